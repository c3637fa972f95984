"""Layer 1: whether the model runs in the engine at all, and computes what the clean float32 model computes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from kernels.errors import InputError
from profiles.engines import child, open_engine
from profiles.engines.base import EngineFailure, GenerateRequest, Settings, Stack
from profiles.engines.transformers_engine import promoted_json
from profiles.models import load_tokenizer
from profiles.prompts import PromptSource
from profiles.records import Record
from profiles.reference import Reference
from profiles.workload import Workload

KL_NATS = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.03}
"""Largest mean KL(reference ‖ engine) that counts as a match; SmolLM2 in bfloat16 has 8e-4."""
AGREEMENT = {"float32": 0.99, "float16": 0.95, "bfloat16": 0.90}
"""Least share of equal first choices; SmolLM2 in bfloat16 has 0.977."""
SEQUENCES, LENGTH_TOKENS, PREFIX_TOKENS = 4, 48, 16


class BringupReport(Record):
    """What bring-up found."""

    runs: bool
    """Whether the engine started and gave the tokens that were asked for."""
    matches: bool
    """Whether its distributions are those of the reference."""
    resolved: dict[str, Any] = {}
    version: str = ""
    kl_nats: float | None = None
    """Mean KL divergence from the float32 reference on held-out text, through the decode path."""
    agreement: float | None = None
    """Share of positions with the same first choice."""
    diverges_at: str | None = None
    """Path of the first module that computes something else."""
    diverges_kind: str | None = None
    """Its class."""
    relative_error: float | None = None
    """‖engine − reference‖ / ‖reference‖ of that module's output; None where it raised or was not finite."""
    failure: str | None = None
    """Kind of the engine's failure, where it did not run."""
    reason: str = ""


def bringup(
    workload: Workload,
    model_dir: Path,
    *,
    children: Path,
    builds: Path,
    log: Path,
    stack: Stack | None = None,
    reference: Reference | None = None,
    progress: Callable[[str], None] | None = None,
) -> BringupReport:
    """Start the engine, let it speak, compare it with the reference; name the first module that differs, if one does.

    Args:
        workload: gives engine, dtype and traffic.
        model_dir: the model's folder.
        children: folder for pid files.
        builds: cache of built kernels.
        log: file for the engine's output.
        stack: what to bring up; stock when None.
        reference: started; one of its own when None.
        progress: called with a sentence at each step.

    Raises:
        InputError: the workload cannot run at all (unknown engine or knob, context too short).
    """
    say = progress or (lambda _: None)
    stack = stack or Stack(Settings(engine=workload.engine.name))
    tokenizer = load_tokenizer(model_dir)
    sequences = [list(p) for p in PromptSource(tokenizer).held_out(SEQUENCES, LENGTH_TOKENS)]
    children.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bringup-", dir=children))
    engine = open_engine(workload, model_dir, stack, children=children, builds=builds, log=log)
    found: dict[str, Any] = {"runs": False, "matches": False}
    try:
        say("Starting the engine")
        resolved = engine.start()
        found |= {"resolved": resolved.config, "version": resolved.version}
        _speak(engine, sequences)
        found["runs"] = True
        say("Comparing it with the float32 reference")
        engine.score(sequences, PREFIX_TOKENS, scratch / "scores.npy")
        engine.stop()
        shared = contextlib.nullcontext(reference) if reference is not None else None
        with shared or Reference(model_dir, children=children, log=log) as truth:
            distance = truth.witness_distance(sequences, PREFIX_TOKENS, scratch / "scores.npy")
    except EngineFailure as failure:
        return BringupReport(**found, failure=failure.kind, reason=failure.detail)
    finally:
        engine.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    dtype = workload.model.dtype
    if not distance.problem:
        kl, agreement = float(distance.kl_nats.mean()), float(distance.agreement.mean())
        found |= {"kl_nats": kl, "agreement": agreement}
        if kl <= KL_NATS[dtype] and agreement >= AGREEMENT[dtype]:
            reason = f"runs and matches: KL {kl:.2g} nats, {agreement:.1%} equal first choices"
            return BringupReport(**{**found, "matches": True}, reason=reason)
        reason = f"does not match the float32 reference: KL {kl:.2g} nats, {agreement:.1%} equal first choices"
    else:
        reason = f"gives no distributions: {distance.problem}"
    if stack.settings.engine == "transformers":
        say("Looking for the first module that diverges")
        try:
            place = locate(workload, model_dir, stack, sequences, children=children, builds=builds, log=log)
        except EngineFailure as failure:
            return BringupReport(**found, reason=f"{reason}; the search for the module failed: {failure}")
        if place is None:
            reason += "; each module alone is within its tolerance: the difference is in the path, or has added up"
        else:
            found |= {"diverges_at": place["module"], "diverges_kind": place["kind"]}
            found["relative_error"] = place["relative_error"]
            reason += f"; first at {place['module']} ({place['kind']}). {place['note']}".rstrip()
    return BringupReport(**found, reason=reason)


def locate(
    workload: Workload,
    model_dir: Path,
    stack: Stack,
    sequences: list[list[int]],
    *,
    children: Path,
    builds: Path,
    log: Path,
) -> dict[str, Any] | None:
    """The first module of the model, with the stack's kernels in it, that differs from the float32 model; None: none.

    Runs in a confined child, since promoted kernels do. Keys: module, kind, relative_error, tolerance, note.

    Raises:
        EngineFailure: the child fails.
    """
    scratch = Path(tempfile.mkdtemp(prefix="locate-", dir=children))
    helper = child.spawn(
        "profiles.engines.divergence:serve",
        children=children,
        log=log,
        environment=child.environment_for(1, "passive", [("HOME", str(scratch)), ("TMPDIR", str(scratch))]),
        name="locate",
        scratch=scratch,
    )
    message = {
        "op": "locate",
        "model_dir": str(model_dir.resolve()),
        "builds": str(builds.resolve()),
        "dtype": workload.model.dtype,
        "threads": 1,
        "promoted": [promoted_json(promoted) for promoted in stack.kernels],
        "sequences": sequences,
        "scratch": str(scratch),
        "writable": [],
        "memory_bytes": psutil.virtual_memory().total,
        "confinement": "sandbox",
    }
    try:
        return helper.ask(message, 300)["divergence"]
    finally:
        helper.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _speak(engine: Any, sequences: list[list[int]]) -> None:
    """Let the engine continue each text by four tokens. Raises EngineFailure when it gives another number."""
    wanted = 4
    given = {f"bringup-{i}": 0 for i in range(len(sequences))}
    waiting = set(given)
    for name, tokens in zip(given, sequences, strict=True):
        engine.submit(GenerateRequest(id=name, prompt=tuple(tokens[:PREFIX_TOKENS]), max_tokens=wanted))
    while waiting:
        for event in engine.events(120):
            given[event.request_id] += len(event.tokens)
            if event.done:
                waiting.discard(event.request_id)
    if any(count != wanted for count in given.values()):
        raise EngineFailure("crash", f"asked for {wanted} tokens each, got {sorted(given.values())}")


def require(report: BringupReport) -> None:
    """Raise InputError when bring-up did not succeed: nothing further would mean anything."""
    if not report.runs:
        raise InputError(
            f"The model does not run in the engine ({report.failure}): {report.reason}.", remedy="See the log."
        )
    if not report.matches:
        raise InputError(f"The engine {report.reason}.", remedy="Use another dtype or engine, or mend that module.")
