"""`roofloop judge --suite FOLDER`: a verdict on every candidate of a folder; stopped, it goes on where it was."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli_common import show
from flows.cli_judge import read_candidate
from flows.terminal import Streams
from kernels.errors import InputError
from kernels.identity import content_hash
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from kernels.ruler.spec import Candidate, Problem
    from kernels.ruler.verdict import Verdict

HEADER = re.compile(r"^\s*(?:#|//)\s*op:\s*(\w+)", re.MULTILINE)
ENTRY = re.compile(r"\bvoid\s+run_(\w+)\s*\(")


def judge_folder(
    folder: Path,
    problem: str | None,
    place: Workspace,
    options: Callable[[Problem], Mapping[str, Any]],
    streams: Streams,
) -> dict[str, Any]:
    """Judge every `.py` and `.cpp` file below `folder`, with a line for each as it comes.

    Args:
        folder: of candidates.
        problem: what all of them solve; None: what each says itself, by a comment `op: NAME` or its C function's name.
        place: verdicts are kept in its `.roofloop/suites/`; settled ones of the same ruler are used again.
        options: for `kernels.ruler.judge.judge`, by problem.
        streams: where the lines go.

    Returns:
        `folder`, `counts` by status, `left_out` (files that name no problem) and `candidates`, a row each.

    Raises:
        InputError: there is no such folder, or nothing in it to judge.
    """
    from kernels import problems
    from kernels.ruler.suite import judge_suite

    if not folder.is_dir():
        raise InputError("There is no such folder.", file=folder, key="--suite", remedy="Name a folder of candidates.")
    known: dict[str, Problem] = {}
    left_out: list[str] = []

    def load(path: Path) -> tuple[Problem, Candidate] | None:
        name = problem or named_in(path)
        if name is None or (problem is None and name not in problems.NAMES):
            left_out.append(str(path.relative_to(folder)))
            return None
        if name not in known:
            known[name] = problems.load(name)
        return known[name], read_candidate(path, known[name])

    results = place.state / "suites" / content_hash([str(folder.resolve()), problem])[:16]
    rows = []
    for path, verdict, kept in judge_suite(folder, load, results, options):
        rows.append(_row(path.relative_to(folder), verdict, kept=kept))
        said = rows[-1]
        speed = "" if said["speedup"] is None else f" {said['speedup']['estimate']:.3f}×"
        streams.err.write(f"{len(rows)}: {said['file']}: {said['status']}{speed}{' (kept)' if kept else ''}\n")
        streams.err.flush()
    if not rows:
        raise InputError(
            "No candidate in this folder says what it solves.", file=folder, key="--suite",
            remedy="Name the problem: roofloop judge PROBLEM --suite FOLDER.",
        )  # fmt: skip
    counts = dict(Counter(row["status"] for row in rows))
    return {"folder": str(folder), "counts": counts, "left_out": left_out, "candidates": rows}


def named_in(path: Path) -> str | None:
    """The problem that a candidate's comment or C function names."""
    text = path.read_text(encoding="utf-8", errors="replace")
    found = HEADER.search(text) or ENTRY.search(text)
    return found.group(1) if found else None


def show_folder(found: Mapping[str, Any]) -> None:
    """The table for people."""
    rows = [
        {
            "candidate": row["file"], "problem": row["problem"], "verdict": row["status"],
            "speedup": "" if row["speedup"] is None else f"{row['speedup']['estimate']:.3f}×",
            "faster": {True: "yes", False: "no", None: ""}[row["faster"]], "why": row["law"] or row["reason"][:80],
        }
        for row in found["candidates"]
    ]  # fmt: skip
    show(rows, as_json=False)
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in sorted(found["counts"].items()))
    print(f"{len(rows)} judged: {counts}. {len(found['left_out'])} left out.")


def _row(path: Path, verdict: Verdict, *, kept: bool) -> dict[str, Any]:
    speed = verdict.speedup
    return {
        "file": str(path), "problem": verdict.problem, "status": verdict.status, "reason": verdict.reason,
        "law": verdict.law, "speedup": None if speed is None else {
            "estimate": speed.estimate, "low": speed.low, "high": speed.high, "n": speed.n},
        "claim": verdict.claim, "faster": verdict.faster, "provenance": verdict.provenance.get("verdict"),
        "confinement": verdict.confinement.get("level"), "verdict_id": verdict.id, "kept": kept,
    }  # fmt: skip
