"""What an idea is worth: score = P(success) · gain · urgency · (1 − accuracy penalty) / cost in minutes.

* **P(success)** is the mean of a Beta posterior per lever. Its prior is the posterior of the operator family, whose
  prior is that of the target family, whose prior is Beta(κ·p₀, κ·(1−p₀)) with p₀ = 0.4 and κ = 4: a lever that was
  never tried is judged by its relatives, and each result of its own counts for more than theirs. Only verdicts and
  end-to-end results count (the view `results`); crash risk takes its share off.
* **Gain** is the share of end-to-end time that goes away: time share · (1 − 1/s), where s is the speed-up that the
  lever has shown (median of its wins), and never more than time share · (1 − 1/headroom), which physics allows.
* **Urgency** is 1 + ½·log2(headroom), at most 2, times the best peer's lead (1 to 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kb.records import Idea, ScoreParts
from kb.store import Store

PRIOR_SUCCESS = 0.4
"""Chance of a campaign of which nothing is known."""
STRENGTH = 4.0
"""κ: how many results of its own a lever needs to weigh as much as its relatives."""
LEAST_COST_MINUTES = 0.1
CRASH_PRONE = 0.5
"""Crash risk from which on an idea is not tried."""

Key = tuple[str, ...]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Odds:
    """Successes and failures so far, pooled at three widths: lever, operator family, target family."""

    counts: Mapping[Key, tuple[float, float]] = field(default_factory=dict)
    """By (target family,), (target family, operator) and (target family, operator, lever)."""
    speedups: Mapping[Key, float] = field(default_factory=dict)
    """Median speed-up of the wins, by (target family, operator, lever)."""

    def posterior(self, target_family: str, operator: str, lever: str) -> tuple[float, float]:
        """Parameters (a, b) of the lever's Beta posterior."""
        a, b = STRENGTH * PRIOR_SUCCESS, STRENGTH * (1 - PRIOR_SUCCESS)
        for key in ((target_family,), (target_family, operator), (target_family, operator, lever)):
            mean = a / (a + b)
            wins, losses = self.counts.get(key, (0.0, 0.0))
            a, b = STRENGTH * mean + wins, STRENGTH * (1 - mean) + losses
        return a, b

    def chance(self, target_family: str, operator: str, lever: str) -> float:
        """Mean of the posterior."""
        a, b = self.posterior(target_family, operator, lever)
        return a / (a + b)


def odds(store: Store, *, ruler: str | None = None) -> Odds:
    """Count the results of all runs.

    Args:
        store: the knowledge base.
        ruler: only results judged by this version; None counts all.
    """
    rows = store.query(
        """SELECT target_family, operator, lever, sum(success) AS wins, count(*) - sum(success) AS losses,
             median(speedup) FILTER (success = 1) AS speedup
           FROM results WHERE $ruler IS NULL OR ruler = $ruler GROUP BY ALL""",
        {"ruler": ruler},
    )
    counts: dict[Key, tuple[float, float]] = {}
    speedups: dict[Key, float] = {}
    for row in rows:
        key = (row["target_family"] or "", row["operator"], row["lever"])
        for width in (1, 2, 3):
            wins, losses = counts.get(key[:width], (0.0, 0.0))
            counts[key[:width]] = (wins + float(row["wins"]), losses + float(row["losses"]))
        if row["speedup"] is not None:
            speedups[key] = float(row["speedup"])
    return Odds(counts, speedups)


def bounded_gain(time_share: Floats, headroom: Floats, shown: Floats | None = None) -> Floats:
    """Share of end-to-end time that can go away: time share · (1 − 1/min(headroom, shown speed-up)).

    `shown` is infinite where nothing was shown. A headroom below 1 counts as 1.
    """
    reach = np.maximum(headroom, 1.0) if shown is None else np.clip(shown, 1.0, np.maximum(headroom, 1.0))
    return np.asarray(time_share * (1.0 - 1.0 / reach))


def urgency(headroom: Floats, peer_ratio: float | None = None) -> Floats:
    """1 + ½·log2(headroom), at most 2, times the peer's lead within 1 to 2."""
    lead = 1.0 if peer_ratio is None else min(2.0, max(1.0, peer_ratio))
    return np.asarray(np.minimum(2.0, 1.0 + 0.5 * np.log2(np.maximum(headroom, 1.0))) * lead)


def score(
    ideas: Sequence[Idea],
    known: Odds,
    *,
    target_family: str,
    at: str,
    why: str,
    peer_ratio: float | None = None,
    now: Mapping[str, tuple[float, float]] | None = None,
) -> list[ScoreParts]:
    """Score ideas, all in one stroke.

    Args:
        ideas: any number.
        known: what was counted.
        target_family: `cpu`, `cuda`, `rocm`, `neuron`.
        at: time to write into the scores.
        why: what happened, in a sentence.
        peer_ratio: best peer's figure over today's.
        now: (time share, headroom) of the newest profile by problem name, in place of those at birth.
    """
    if not ideas:
        return []
    now = now or {}
    fresh = [now.get(i.problem_name or "", (i.time_share, i.headroom)) for i in ideas]
    share = np.array([f[0] for f in fresh])
    headroom = np.array([f[1] for f in fresh])
    keys = [(target_family, i.operator, i.lever) for i in ideas]
    chances = {key: known.chance(*key) for key in set(keys)}
    p = np.array([chances[key] for key in keys]) * (1.0 - np.array([i.crash_risk for i in ideas]))
    shown = np.array([known.speedups.get(key, np.inf) for key in keys])
    gain = bounded_gain(share, headroom, shown)
    haste = urgency(headroom, peer_ratio)
    penalty = np.array([i.accuracy_risk for i in ideas])
    cost = np.maximum(np.array([i.cost_minutes for i in ideas]), LEAST_COST_MINUTES)
    total = p * gain * haste * (1.0 - penalty) / cost
    columns = zip(*(a.tolist() for a in (p, gain, haste, penalty, cost, total, share, headroom)), strict=True)
    names = ("p_success", "gain", "urgency", "accuracy_penalty", "cost_minutes", "score", "time_share", "headroom")
    # model_construct: the figures come from checked records, and 10,000 validations a rescore would be felt.
    return [ScoreParts.model_construct(**dict(zip(names, row, strict=True)), why=why, at=at) for row in columns]


def excluded(idea: Idea) -> str | None:
    """Why an idea may not be tried at all, or None."""
    if idea.crash_risk >= CRASH_PRONE:
        return f"crash risk {idea.crash_risk:.2f} is {CRASH_PRONE} or more"
    if idea.accuracy_risk >= 1.0:
        return "it breaks the accuracy gate, which is not traded for speed"
    return None
