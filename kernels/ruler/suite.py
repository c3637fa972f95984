"""A folder of candidates, one verdict each, kept as files: stop it anywhere and go on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernels.identity import content_hash
from kernels.ruler.judge import judge, versions
from kernels.ruler.spec import Candidate, Problem
from kernels.ruler.verdict import Verdict

SETTLED = ("valid", "incorrect", "build_failed")
"""Statuses that are not tried again; crashes, time-outs, void and unresolved ones are."""
PLACES = ("builds",)
"""Options that say where files lie, and nothing of the measurement."""
Loader = Callable[[Path], "tuple[Problem, Candidate] | None"]


def judge_suite(
    folder: Path, load: Loader, results: Path, options: Callable[[Problem], Mapping[str, Any]]
) -> Iterator[tuple[Path, Verdict, bool]]:
    """Judge every file of `folder` that `load` makes a problem and a candidate of, in the order of their names.

    Args:
        folder: searched recursively for `.py` and `.cpp` files.
        load: gives problem and candidate of a file, or None to leave it out.
        results: folder of verdict files; one is used again if problem, candidate, ruler and options are the same.
        options: keyword arguments of `judge` for a problem.

    Yields:
        (file, verdict, whether it was there already), as they come.
    """
    results.mkdir(parents=True, exist_ok=True)
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cpp") and p.is_file()):
        found = load(path)
        if found is None:
            continue
        problem, candidate = found
        terms = options(problem)
        told = content_hash({name: str(value) for name, value in terms.items() if name not in PLACES})[:16]
        kept = results / f"{problem.id[:16]}-{candidate.id[:16]}-{told}-{versions()['ruler']}.json"
        old = _read(kept)
        if old is not None and old.status in SETTLED:
            yield path, old, True
            continue
        verdict = judge(problem, candidate, **terms)
        write(verdict, kept)
        yield path, verdict, False


def write(verdict: Verdict, path: Path) -> None:
    """Write a verdict as one JSON file, atomically."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.write_text(json.dumps(verdict.to_json()))
    draft.replace(path)


def _read(path: Path) -> Verdict | None:
    try:
        return Verdict.from_json(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
