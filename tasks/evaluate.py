"""Two stacks side by side on the workload's own traffic: which one is faster, for sure, and does it still say the same.

Both engines are up, each in its own child; while one is timed the other is stopped. Pairs of rounds run in the order
A B, B A, B A, A B …; in each pair both get the same prompts, half of the pairs visible ones and half hidden ones, drawn
afresh from the operating system's randomness. The ratio of each pair is analysed on the log scale (`profiles.stats`).
Then the clean reference scores requests that are drawn, after the fact, from those that were timed. What comes out is a
`Comparison`: figures and answers, no decision; `tasks.promote` decides.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from profiles import accuracy, traffic
from profiles.accuracy import AccuracyVerdict, Distance
from profiles.engines.base import Engine, EngineFailure, OverlayCount, Resolved
from profiles.prompts import Prompt, PromptSource
from profiles.records import Record
from profiles.reference import Reference
from profiles.stats import (
    RatioInterval,
    decided,
    difference_of_logs,
    interval_of_logs,
    level_per_look,
    log_ratios,
    self_spread,
)
from profiles.traffic import Round
from profiles.workload import Workload, higher_is_better

WARM_UP_TOKENS = 32


class Pair(Record):
    """One round of each engine on the same prompts."""

    hidden: bool
    order: Literal["AB", "BA"]
    a: float
    b: float
    ratio: float
    """How much better B is: above 1 is better, whichever way the metric points."""


class GateCheck(Record):
    """One hard limit of the workload on B's timed requests."""

    name: str
    limit: float
    value: float | None
    status: accuracy.Status


class Comparison(Record):
    """What was measured. B is what would take A's place."""

    metric: str
    a: Resolved
    b: Resolved | None
    pairs: tuple[Pair, ...] = ()
    a_value: float | None = None
    """Median over A's rounds."""
    b_value: float | None = None
    interval: RatioInterval | None = None
    """B against A over all pairs, at the level of one look."""
    visible: RatioInterval | None = None
    hidden: RatioInterval | None = None
    hidden_difference: float = 0.0
    """Mean log ratio on hidden prompts minus that on visible ones."""
    hidden_p: float = 1.0
    """Chance of a shortfall on hidden prompts this large if there were none."""
    level: float
    """Level for the whole comparison; each of `looks` looks had its share."""
    looks: int
    threshold: float
    """What the interval must lie above: 1 + the larger of the least gain worth keeping and the A/A noise."""
    a_row: dict[str, float | int | bool | None] = Field(default_factory=dict)
    """A's normalised row over all rounds (`profiles.traffic.COLUMNS`)."""
    b_row: dict[str, float | int | bool | None] = Field(default_factory=dict)
    a_spread: float = 0.0
    """Standard deviation of the log of one of A's rounds against its neighbours: the A/A noise of this machine now."""
    verdict: Literal["above", "below"] | None = None
    """Where the interval lies of the threshold; None: undecided."""
    failure: str = ""
    """Why B could not be measured to the end."""
    note: str = ""
    gates: tuple[GateCheck, ...] = ()
    accuracy: AccuracyVerdict | None = None
    """None when B was not faster, and its accuracy was not looked at."""
    distance: Distance | None = None
    """B's distance from the reference."""
    a_distance: Distance | None = None
    """A's, where A was measured as stock."""
    counts: tuple[OverlayCount, ...] = ()
    """B's overlay during the timed rounds and the gate."""
    amdahl_limit: float | None = None
    a_peak_memory_bytes: int | None = None
    b_peak_memory_bytes: int | None = None
    duration_s: float
    raw_file: str = ""
    about: dict[str, Any] = Field(default_factory=dict)


@dataclass
class _Side:
    """One engine of the comparison."""

    name: Literal["a", "b"]
    engine: Engine
    resolved: Resolved | None = None
    rounds: list[Round] = field(default_factory=list)
    timed: list[tuple[str, Prompt, tuple[int, ...]]] = field(default_factory=list)
    """Key, prompt and tokens of each timed request; in memory only."""


class _CandidateFailure(Exception):
    """B failed: an answer, not an error."""


def compare(
    open_a: Callable[[], Engine],
    open_b: Callable[[], Engine],
    workload: Workload,
    source: PromptSource,
    reference: Reference,
    *,
    min_pairs: int = 4,
    max_pairs: int = 8,
    level: float = 0.95,
    deadline: float | None = None,
    seed: int = 0,
    min_gain: float = 0.005,
    noise_floor: float | None = None,
    stock: Distance | None = None,
    required: Sequence[str] = (),
    amdahl_limit: float | None = None,
    score_requests: int = 16,
    strict: bool = False,
    always_gate: bool = False,
    stall_s: float = 120.0,
    raw: Path | None = None,
    about: dict[str, Any] | None = None,
    progress: Callable[[str, RatioInterval | None], None] | None = None,
) -> Comparison:
    """Measure B against A.

    Args:
        open_a: makes the engine in force, not yet started.
        open_b: makes the engine that would take its place.
        workload: traffic, metric and gates.
        source: prompts.
        reference: started.
        min_pairs: pairs before the first look; below 4 there is a single pair of some kind.
        max_pairs: most pairs. Looks are taken every two pairs and share `level` (Bonferroni).
        level: two-sided confidence level of the whole comparison; `profiles.stats.keep_level(i)` for the i-th test.
        deadline: `time.monotonic()` at which the timed rounds end; no pair starts that would not be done by then.
        seed: decides the visible prompts.
        min_gain: least gain worth keeping, as a fraction.
        noise_floor: what an A/A comparison on this machine gave (`aa_floor`), as a fraction; None: what A shows against
            itself within this comparison, `a_spread` / √pairs.
        stock: the stock engine's distance from the reference; None: A is stock, and its own timed tokens are scored.
        required: ids of B's promoted candidates, each of which must have been called.
        amdahl_limit: most that B can gain by the time shares of what was replaced, as a ratio.
        score_requests: timed requests that are scored, per engine.
        strict: accuracy by non-inferiority (`profiles.accuracy.judge`).
        always_gate: look at accuracy even where B is not faster.
        stall_s: silence after which an engine hangs.
        raw: where the untouched rounds are written.
        about: goes into the raw file and the record: stack ids, purpose.
        progress: called after each pair with a sentence and the interval so far.

    Raises:
        EngineFailure: A or the reference failed. B's failure is in `Comparison.failure`.
    """
    began = time.monotonic()
    metric, looks = workload.objective, max((max_pairs - min_pairs) // 2 + 1, 1)
    a, b = _Side("a", open_a()), _Side("b", open_b())
    pairs: list[Pair] = []
    failure = note = ""
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(a.engine.stop)
        stack.callback(b.engine.stop)
        try:
            _start(a, b)
            for side, other in ((a, b), (b, a)):
                with _only(side, other), _as_answer(side):
                    _warm_up(side.engine, workload, source, seed, stall_s)
                    side.engine.reset_counts()
            longest = 0.0
            while len(pairs) < max_pairs:
                if deadline is not None and time.monotonic() + longest > deadline:
                    note = f"The time was over after {len(pairs)} pairs."
                    break
                pair_began = time.monotonic()
                pairs.append(_pair(len(pairs), a, b, workload, source, seed=seed, stall_s=stall_s))
                longest = max(longest, time.monotonic() - pair_began)
                result = _analyse(metric, pairs, level_per_look(level, looks), min_gain, noise_floor)
                if progress is not None:
                    progress(f"pair {len(pairs)} of at most {max_pairs}", result["interval"])
                look = len(pairs) >= min_pairs and (len(pairs) - min_pairs) % 2 == 0
                if look and result["verdict"] is not None:
                    break
            if len(pairs) < min_pairs:
                result["verdict"] = None
            result["gates"] = _gates(workload, b)
            if always_gate or result["verdict"] == "above":
                result |= _accuracy(
                    workload, a, b, source, reference, stock=stock, required=required, n=score_requests, strict=strict
                )
        except _CandidateFailure as error:
            failure = str(error)
            result["verdict"] = None
        finally:
            for side in (a, b):
                _signal(side.engine, signal.SIGCONT)
        peaks: dict[str, Any] = {f"{s.name}_peak_memory_bytes": s.engine.peak_memory_bytes() or None for s in (a, b)}
        peaks |= {f"{s.name}_row": _row(s, workload) for s in (a, b) if s.rounds}
    if raw is not None:
        traffic.write_raw(raw, [*a.rounds, *b.rounds], {**(about or {}), "rounds_of_a": len(a.rounds)})
    assert a.resolved is not None
    result.setdefault("threshold", 1 + max(min_gain, noise_floor or 0.0))
    return Comparison(
        metric=metric,
        a=a.resolved,
        b=b.resolved,
        pairs=tuple(pairs),
        level=level,
        looks=looks,
        failure=failure,
        note=note,
        amdahl_limit=amdahl_limit,
        duration_s=time.monotonic() - began,
        raw_file="" if raw is None else str(raw),
        about=about or {},
        **peaks,
        **result,
    )


def _start(a: _Side, b: _Side) -> None:
    """Bring both up side by side; nothing is timed yet."""
    with ThreadPoolExecutor(2) as pool:
        starting = [(side, pool.submit(side.engine.start)) for side in (a, b)]
    for side, started in starting:
        with _as_answer(side):
            side.resolved = started.result()


def aa_floor(comparison: Comparison) -> float | None:
    """Noise floor, as a fraction, from a comparison of an engine with itself in two processes: how far from 1 the end
    of its interval lies. None where there were too few pairs.
    """
    interval = comparison.interval
    return None if interval is None else max(interval.high, 1 / interval.low) - 1


def _pair(
    index: int, a: _Side, b: _Side, workload: Workload, source: PromptSource, *, seed: int, stall_s: float
) -> Pair:  # fmt: skip
    """Time both sides on the same prompts. Of four pairs, visible and hidden ones each have either side first once."""
    hidden, a_first = index % 4 in (1, 2), index % 4 in (0, 3)
    secret = secrets.token_bytes(32) if hidden else None
    round_seed = 1000 * seed + 500 + index
    prompts = traffic.draw_prompts(source, workload.traffic, round_seed, secret)
    values: dict[str, float] = {}
    for side, other in ((a, b), (b, a)) if a_first else ((b, a), (a, b)):
        with _only(side, other), _as_answer(side):
            found = traffic.run_round(
                side.engine, workload.traffic, prompts, seed=round_seed, gates=workload.gates, hidden=hidden,
                stall_s=stall_s,
            )  # fmt: skip
            side.rounds.append(found)
            value = found.metric(workload.objective)
            if not found.ok or value is None or value <= 0:
                failed, why = found.summary.failed, "; ".join(found.errors)
                raise EngineFailure("refused", f"{failed} of {len(found.rows)} requests failed: {why}")
            values[side.name] = value
            side.timed += [(f"{index}.{r.index}", prompts[r.index], r.tokens) for r in found.rows]
    ratio = values["b"] / values["a"] if higher_is_better(workload.objective) else values["a"] / values["b"]
    return Pair(hidden=hidden, order="AB" if a_first else "BA", a=values["a"], b=values["b"], ratio=ratio)


def _analyse(
    metric: str, pairs: Sequence[Pair], level: float, min_gain: float, noise_floor: float | None
) -> dict[str, Any]:  # fmt: skip
    logs = {
        kind: log_ratios(r, [1.0] * len(r))
        for kind in (False, True)
        if (r := [p.ratio for p in pairs if p.hidden is kind])
    }
    every = interval_of_logs(log_ratios([p.ratio for p in pairs], [1.0] * len(pairs)), level)
    difference, chance = (0.0, 1.0)
    if len(logs) == 2:
        difference, chance = difference_of_logs(logs[False].tolist(), logs[True].tolist())
    spread = self_spread([p.a for p in pairs])
    floor = spread / math.sqrt(len(pairs)) if noise_floor is None else noise_floor
    threshold = 1 + max(min_gain, floor)
    return {
        "a_value": statistics.median(p.a for p in pairs),
        "b_value": statistics.median(p.b for p in pairs),
        "interval": every,
        "visible": interval_of_logs(logs[False]) if False in logs else None,
        "hidden": interval_of_logs(logs[True]) if True in logs else None,
        "hidden_difference": difference,
        "hidden_p": chance,
        "threshold": threshold,
        "a_spread": spread,
        "verdict": decided(every, threshold),
    }


def _row(side: _Side, workload: Workload) -> dict[str, float | int | bool | None]:
    summary = traffic.pool(side.rounds, workload.gates)
    return {column: traffic.metric_of(summary, column) for column in traffic.COLUMNS}


def _gates(workload: Workload, side: _Side) -> tuple[GateCheck, ...]:
    summary, gates = traffic.pool(side.rounds, workload.gates), workload.gates
    memory = summary.peak_memory_bytes
    found = (
        ("ttft_p95_ms", gates.ttft_p95_ms, traffic.metric_of(summary, "ttft_ms_p95")),
        ("tpot_p95_ms", gates.tpot_p95_ms, traffic.metric_of(summary, "tpot_ms_p95")),
        ("peak_memory_gib", gates.peak_memory_gib, None if memory is None else memory / 2**30),
    )
    return tuple(
        GateCheck(
            name=name,
            limit=limit,
            value=value,
            status="cannot_evaluate" if value is None else "pass" if value <= limit else "fail",
        )
        for name, limit, value in found
        if limit is not None
    )


def _accuracy(
    workload: Workload, a: _Side, b: _Side, source: PromptSource, reference: Reference, *, stock: Distance | None,
    required: Sequence[str], n: int, strict: bool,
) -> dict[str, Any]:  # fmt: skip
    """Score timed requests and ask for the witness; the same requests of both sides where A is stock."""
    if not workload.gates.accuracy.enabled:
        empty = Distance(sample=accuracy.Sample())
        return {"accuracy": accuracy.judge(workload.gates.accuracy, empty, empty)}
    chosen = set(secrets.SystemRandom().sample([key for key, _, _ in b.timed], min(n, len(b.timed))))

    def distance(side: _Side, other: _Side) -> Distance:
        sample = accuracy.sample(reference, [item for item in side.timed if item[0] in chosen])
        with _only(side, other), _as_answer(side):
            return Distance(
                sample=sample, witness=accuracy.witness(reference, side.engine, source, workload.traffic)
            )  # fmt: skip

    found: dict[str, Any] = {"distance": distance(b, a)}
    with _only(b, a), _as_answer(b):
        found["counts"] = b.engine.counts()
    if stock is None:
        stock = found["a_distance"] = distance(a, b)
    found["accuracy"] = accuracy.judge(
        workload.gates.accuracy, found["distance"], stock, counts=found["counts"], required=required, strict=strict
    )
    return found


def _warm_up(engine: Engine, workload: Workload, source: PromptSource, seed: int, stall_s: float) -> None:
    """One round that is thrown away: the workload's, with at most 32 output tokens."""
    spec = workload.traffic
    short = spec.model_copy(update={"output_tokens": min(spec.output_tokens, WARM_UP_TOKENS)})
    prompts = traffic.draw_prompts(source, short, 1000 * seed + 499)
    traffic.run_round(engine, short, prompts, seed=seed, stall_s=stall_s)


@contextlib.contextmanager
def _only(side: _Side, other: _Side) -> Iterator[None]:
    """Inside the block `side` has the machine: `other` is stopped, and goes on being so until it is its turn."""
    _signal(other.engine, signal.SIGSTOP)
    _signal(side.engine, signal.SIGCONT)
    yield


@contextlib.contextmanager
def _as_answer(side: _Side) -> Iterator[None]:
    """B's failure is an answer; A's is an error of the run."""
    try:
        yield
    except EngineFailure as failure:
        if side.name == "a":
            raise
        raise _CandidateFailure(str(failure)) from failure


def _signal(engine: Engine, number: signal.Signals) -> None:
    """Stop or continue the engine's process group(s), where the adapter names them."""
    groups = _groups(engine)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _groups(engine: Engine) -> tuple[int, ...]:
    """`process_group` where the adapter has one, else `pids`: each child leads a group of its own."""
    found: Any = getattr(engine, "process_group", None)
    if found is None:
        found = getattr(engine, "pids", ())
    return (found,) if isinstance(found, int) else tuple(found)
