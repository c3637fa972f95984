"""What was timed at one shape, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kernels.ruler import stats
from kernels.ruler.floor import Ceilings, floor_s
from kernels.ruler.handle import WorkerFailed
from kernels.ruler.spec import Problem
from kernels.ruler.verdict import ShapeResult

MOST_OVERHEAD, MOST_WAITED, MOST_DRIFT = 0.05, 0.10, 1.3
"""Largest share of the ruler's cost in a time, of waiting for a core in a call, and drift of the baseline."""
CACHE_BYTES = 96 << 20
"""More than the caches hold."""


@dataclass
class Timed:
    """What was measured at one shape; lists in seconds per handshake, one entry a turn.

    Each turn runs all sides on the same fresh values; who goes first changes from turn to turn, since the first finds
    the caches otherwise. A round is as many turns as there are sides, and a ratio is the geometric mean over one round.
    """

    shape: dict[str, int]
    slots: int
    """Calls of the candidate in one handshake; of the baseline `baseline_slots`, on the first of the same inputs."""
    baseline_slots: int
    which: int
    """Number of the baseline that was the fastest here."""
    baseline: str
    expected_s: float
    """Quick time of one call of that baseline."""
    sides: int = 2
    raw: dict[str, list[float]] = field(default_factory=dict)
    faults: dict[str, float] = field(default_factory=dict)
    """Page faults a call of `baseline` and `candidate`."""

    def add(self, **figures: float) -> None:
        """Append one figure to each named list."""
        for name, value in figures.items():
            self.raw.setdefault(name, []).append(value)

    def cost_s(self, side: str) -> float:
        """Median cost of a handshake that calls nothing, by the way `baseline` or `candidate` is called."""
        return float(np.median(self.raw[f"{side}_cost"]))

    def rounds(self, *, calm: bool) -> list[int]:
        """First turns of the complete rounds; with `calm` of those in which no side had to wait long for a core."""
        waited, starts = self.raw["waited"], range(0, len(self.raw["waited"]) - self.sides + 1, self.sides)
        return [i for i in starts if not calm or max(waited[i : i + self.sides]) <= MOST_WAITED]

    def per_call(self, side: str, rounds: list[int]) -> list[float]:
        """Seconds per call of `baseline`, `candidate` or `twin`: geometric means over rounds, the handshake taken off.

        Where the candidate writes its results in place and the baseline returns tensors, the time to copy those into
        the ruler's memory is taken off the baseline.
        """
        cost = self.cost_s("candidate" if side == "candidate" else "baseline")
        if side != "candidate" and "copy" in self.raw:
            cost = float(np.median(self.raw["copy"]))
        calls = self.slots if side == "candidate" else self.baseline_slots
        turns = np.maximum(np.asarray(self.raw[side]) - cost, 1e-12) / calls
        return [float(np.exp(np.log(turns[i : i + self.sides]).mean())) for i in rounds]


def conclude(
    timed: Timed, problem: Problem, ceilings: Ceilings | None, *, alpha: float, threshold: float, spread: float
) -> tuple[ShapeResult, str]:
    """The result at one shape, and why it is not resolved (empty when it is).

    `spread`: of the log of an estimate from one set of fresh processes to another (`stats.spread_of`).

    Raises:
        WorkerFailed: void, by the laws of `clock`, `physics` or `batch`.
    """
    every, kept = timed.rounds(calm=False), timed.rounds(calm=True)
    used = kept if len(kept) >= stats.least_pairs(alpha) else every
    base, cand = timed.per_call("baseline", used), timed.per_call("candidate", used)
    doubts = []
    if any(not math.isfinite(t) or t <= 0 for side in ("baseline", "candidate") for t in timed.raw[side]):
        raise WorkerFailed("void", "a time was not positive and finite", "clock")
    interval = stats.widened(stats.speedup(base, cand, alpha), spread, alpha)
    overhead = max(timed.cost_s(side) / float(np.median(timed.raw[side])) for side in ("baseline", "candidate"))
    third = max(len(base) // 3, 1)
    drift = float(np.median(base[:third]) / np.median(base[-third:]))
    if len(kept) < len(every) / 2:
        doubts.append(
            f"the machine was busy: in {len(every) - len(kept)} of {len(every)} rounds a side waited for a core"
        )
    if overhead > MOST_OVERHEAD:
        doubts.append(f"the ruler's own cost is {overhead:.0%} of the time measured")
    if len(base) >= 9 and not 1 / MOST_DRIFT < drift < MOST_DRIFT:
        doubts.append(f"the baseline drifted by a factor of {max(drift, 1 / drift):.2f}")
    if interval.low == 0:
        doubts.append(f"{interval.n} rounds are too few")
    least = floor_s(problem, timed.shape, ceilings)
    middle = float(np.median(cand))
    result = ShapeResult(
        shape=timed.shape, speedup=interval, claim=min(stats.claim(base, cand), stats.shrunk(interval, alpha)),
        baseline_s=float(np.median(base)),
        candidate_s=middle, floor_s=least, floor_fraction=None if least is None else least / middle,
        overhead_fraction=overhead, calls_per_handshake=timed.slots, baseline=timed.baseline,
        faster=interval.low > threshold and not doubts,
    )  # fmt: skip
    if ceilings is not None and least is not None and middle < least * (1 - ceilings.margin):
        reason = f"{middle * 1e6:.2f} µs a call is below the floor of {least * 1e6:.2f} µs"
        raise WorkerFailed("void", reason, "physics")
    if "candidate_single" in timed.raw:
        alone, alone_base = (
            float(np.median(timed.raw[f"{side}_single"])) - timed.cost_s(side) for side in ("candidate", "baseline")
        )
        usual = max(alone_base - float(np.median(base)), 0) + 5 * timed.cost_s("candidate")
        if alone - middle > 9 * middle + 3 * usual:
            raise WorkerFailed("void", f"alone a call takes {alone / middle:.0f} times as long", "batch")
    return result, "; ".join(doubts)


_cache: list[np.ndarray] = []


def flush() -> None:
    """Drive everything else out of the caches."""
    if not _cache:
        _cache.append(np.zeros(CACHE_BYTES // 8))
    _cache[0] += 1.0
