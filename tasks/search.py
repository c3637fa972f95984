"""Step 0: the best engine settings under the workload's gates, with the defaults as the one to beat.

The trials are all the state there is: every proposal is a function of the trials so far, the seed and the trial's
number, so a search that was killed goes on exactly as it would have.

A trial that could not be measured (`crash`, `out_of_memory`, `hang`, `start`, `refused`) or missed a gate
(`gate_failed`) has no sentinel value: it is a violated constraint. Settings are told apart by what the engine resolved
them to; asking for the same thing in other words is a replicate.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kb.records import CrashSet, Provenance, Trial
from kernels.identity import content_hash
from profiles.engines.base import EngineFailure, Knob, KnobSpec, Settings
from profiles.workload import Workload, higher_is_better
from tasks.propose import FAILURES, KnobEffect, Space, exclusions, knob_effects, propose, shrink


@dataclass(frozen=True)
class Gate:
    """What one gate came to for one trial."""

    value: float | None
    limit: float | None
    ok: bool | None
    """None: could not be evaluated, which is not a pass."""
    reason: str = ""


@dataclass(frozen=True)
class Measured:
    """What measuring one settings point gave."""

    resolved_hash: str
    resolved: Mapping[str, Any]
    value: float
    """The workload's objective, in its unit."""
    gates: Mapping[str, Gate]
    pruned: bool = False
    """Given up after one round: too far from the best trial so far to become it."""


@dataclass(frozen=True)
class Confirmation:
    """An interleaved comparison of two settings; ratios above 1 mean that the first is better."""

    better: bool
    ratio: float
    low: float
    high: float
    reason: str = ""


@dataclass(frozen=True)
class SearchResult:
    """What the search came to."""

    best: Settings
    """The winner, or the defaults."""
    best_trial: int | None
    """None when no trial passed."""
    reason: str
    trials: tuple[Trial, ...]
    default_first: float | None
    default_last: float | None
    drift: float | None
    """|last / first − 1| of the defaults."""
    confirmations: tuple[Confirmation, ...]
    effects: tuple[KnobEffect, ...]
    crash_sets: tuple[CrashSet, ...]
    """Learnt in this search, shrunk to the combination that explains the failures."""
    excluded: tuple[tuple[dict[str, Knob], str], ...]
    """Combinations that were left out, with the reason."""
    stopped: str
    """Why no further trial was made."""


def search(
    workload: Workload,
    knobs: Sequence[KnobSpec],
    measure: Callable[[Settings, float | None], Measured],
    finished: Sequence[Trial],
    record: Callable[[Trial], None],
    *,
    run_id: str,
    provenance: Provenance,
    seed: int,
    deadline: float,
    crash_sets: Sequence[CrashSet] = (),
    confirm: Callable[[Settings, Settings], Confirmation] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Find the best settings for a workload.

    Args:
        workload: objective, gates, knobs that are held or limited, and `budget.settings_trials`.
        knobs: the engine's knobs, the most promising first.
        measure: runs the engine at these settings; raises EngineFailure when it cannot. Told the best trial's value so
            far (None for a trial that must be measured in full), it may prune.
        finished: trials of this run that were recorded before; none is repeated.
        record: called with each new trial as soon as it is measured; must be durable when it returns.
        run_id: the run that the trials belong to.
        provenance: of the measurements.
        seed: same seed and same measurements, same trials.
        deadline: value of `clock()` at which all must be over; no trial starts that would not end in time.
        crash_sets: combinations known to fail here; points that hold one are left out.
        confirm: interleaved comparison; the winner must pass it against the defaults. Without one, the winner must lead
            by more than the drift of the defaults and 3 %.
        clock: seconds, monotonic.
    """
    space, trials = Space.of(workload, knobs), sorted(finished, key=lambda t: t.number)
    known = [c for c in crash_sets if c.combination]
    engine = workload.engine.name
    stock = Settings(engine=engine)

    def run(asked: dict[str, Knob], role: Any) -> None:
        number = max((t.number for t in trials), default=-1) + 1
        known = [t.value for t in trials if t.status == "complete" and t.value is not None]
        pick = max if higher_is_better(workload.objective) else min
        best = pick(known) if known and role == "search" else None

        def at(settings: Settings) -> Measured:
            return measure(settings, best)

        trial = _try(workload, asked, number, role, at, trials, run_id, provenance, clock)
        record(trial)
        trials.append(trial)

    def fits(more: int) -> bool:
        times = [t.seconds for t in trials] or [0.0]
        return clock() + max(statistics.median(times), times[0]) * 1.1 * more < deadline

    if not any(t.role == "default" for t in trials):
        run({}, "default")
    # the defaults once more, and a confirmation that takes about three full trials, must still fit after a trial
    after = 1 + (3 if confirm else 0)
    stopped = "all trials of the budget were made"
    while len([t for t in trials if t.role != "default_again"]) < workload.budget.settings_trials:
        if any(t.role == "default_again" for t in trials):
            stopped = "the trials had ended before this start"
            break
        if not fits(1 + after):
            stopped = "no time for another trial"
            break
        point = propose(
            space, trials, seed=seed, metric=workload.objective, crash_sets=known, limit=workload.budget.settings_trials
        )
        if point is None:
            stopped = "every valid combination was tried"
            break
        run(space.knobs(point), "search")
    first = next(t for t in trials if t.role == "default")
    if first.value is not None and not any(t.role == "default_again" for t in trials) and fits(1) and len(trials) > 1:
        run({}, "default_again")
    return _conclude(workload, space, trials, known, stock, provenance, confirm, fits, stopped)


def _try(  # noqa: PLR0917
    workload: Workload,
    asked: dict[str, Knob],
    number: int,
    role: Any,
    measure: Callable[[Settings], Measured],
    trials: Sequence[Trial],
    run_id: str,
    provenance: Provenance,
    clock: Callable[[], float],
) -> Trial:
    """Measure one point; a failure of the engine becomes the trial's status."""
    start = clock()
    fields: dict[str, Any]
    try:
        got = measure(Settings(engine=workload.engine.name, knobs=asked))
    except EngineFailure as failure:
        fields = {"status": failure.kind, "reason": failure.detail}
    else:
        gates = {name: asdict(gate) for name, gate in got.gates.items()}
        missed = [
            f"{n}: {g['reason'] or 'not evaluated' if g['ok'] is None else g['reason'] or 'missed'}"
            for n, g in gates.items()
            if g["ok"] is not True
        ]
        usable = math.isfinite(got.value) and got.value > 0
        twin = next((t.number for t in trials if t.resolved_hash == got.resolved_hash), None)
        status, reason = "complete", ""
        if missed or not usable:
            status, reason = "gate_failed", "; ".join(missed) or f"the objective came out as {got.value}"
        elif twin is not None and role == "search":
            status, reason = "duplicate", f"resolves to the same settings as trial {twin}"
        elif got.pruned:
            status, reason = "pruned", "its first round was far from the best trial"
        fields = {
            "status": status,
            "reason": reason,
            "resolved_hash": got.resolved_hash,
            "resolved": dict(got.resolved),
            "value": got.value if usable else None,
            "gates": gates,
        }
    return Trial(
        run_id=run_id,
        number=number,
        role=role,
        knobs=asked,
        metric=workload.objective,
        seconds=round(clock() - start, 3),
        provenance=provenance,
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **fields,
    )


def _conclude(  # noqa: PLR0917
    workload: Workload,
    space: Space,
    trials: list[Trial],
    known: Sequence[CrashSet],
    stock: Settings,
    provenance: Provenance,
    confirm: Callable[[Settings, Settings], Confirmation] | None,
    fits: Callable[[int], bool],
    stopped: str,
) -> SearchResult:
    """Choose between the best trial and the defaults."""
    sign = 1 if higher_is_better(workload.objective) else -1
    first = next(t for t in trials if t.role == "default")
    last = next((t for t in trials if t.role == "default_again"), None)
    last_value = last.value if last else None
    drift = abs(last_value / first.value - 1) if first.value and last_value else None
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.resolved_hash is not None:
            groups.setdefault(trial.resolved_hash, []).append(trial)
    passed = {
        h: statistics.median(t.value for t in group if t.value is not None)
        for h, group in groups.items()
        if all(t.status in ("complete", "duplicate") for t in group)
    }
    default = passed.get(first.resolved_hash or "")
    ranked = sorted(
        (h for h in passed if h != first.resolved_hash), key=lambda h: (-sign * passed[h], groups[h][0].number)
    )
    confirmations: list[Confirmation] = []
    best, winner, reason = stock, first if default is not None else None, "no settings were better than the defaults"
    for hash_ in ranked[:2]:
        trial = groups[hash_][0]
        settings = Settings(engine=workload.engine.name, knobs=trial.knobs)
        if default is None:
            best, winner, reason = (
                settings,
                trial,
                f"the defaults did not pass ({first.status}: {first.reason}); this did",
            )
            break
        ratio = (passed[hash_] / default) ** sign
        if ratio <= 1:
            break
        if confirm is None:
            margin = max(0.03, drift or 0.0)
            if ratio > 1 + margin:
                best, winner, reason = settings, trial, f"{ratio:.2f}× the defaults, more than their drift"
                break
            reason = f"the best trial's {ratio:.3f}× lies within the noise ({margin:.1%})"
            continue
        if not fits(3):
            reason = f"no time was left to confirm the best trial ({ratio:.3f}×)"
            break
        answer = confirm(settings, stock)
        confirmations.append(answer)
        if answer.better:
            best, winner = settings, trial
            reason = f"confirmed in interleaved rounds: {answer.ratio:.2f}× ({answer.low:.2f} to {answer.high:.2f})"
            break
        reason = f"the best trial's {ratio:.3f}× was not confirmed: {answer.reason or f'{answer.ratio:.3f}×'}"
    return SearchResult(
        best=best,
        best_trial=None if winner is None else winner.number,
        reason=reason,
        trials=tuple(trials),
        default_first=first.value,
        default_last=last_value,
        drift=drift,
        confirmations=tuple(confirmations),
        effects=knob_effects(space, trials, workload.objective),
        crash_sets=_learnt(space, trials, provenance),
        excluded=tuple(exclusions(space, trials, known)),
        stopped=stopped,
    )


def _learnt(space: Space, trials: Sequence[Trial], provenance: Provenance) -> tuple[CrashSet, ...]:
    good = [space.full(t.knobs) for t in trials if t.status not in FAILURES]
    found: dict[str, CrashSet] = {}
    scope = {"engine": provenance.engine, "target": provenance.target, "workload": provenance.workload}
    for trial in trials:
        if trial.status not in FAILURES or trial.role != "search":
            continue
        combination = shrink(space.full(trial.knobs), good, space.defaults)
        id_ = content_hash([scope, combination, trial.status])[:16]
        seen = found[id_].seen + 1 if id_ in found else 1
        found[id_] = CrashSet(
            id=id_,
            scope=scope,
            combination=combination,
            failure=trial.status,
            detail=trial.reason,
            versions={"engine": provenance.engine, "roofloop": provenance.roofloop},
            seen=seen,
        )
    return tuple(found.values())
