"""The numbers: paired ratios, their interval, the conservative claim, and error control over many tries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from kernels.ruler.verdict import Interval


def median_interval(values: Sequence[float], alpha: float = 0.05) -> tuple[float, float, float]:
    """(median, low, high): the distribution-free interval of the median between order statistics.

    Exact at any n for independent draws (sign test). Below six values at alpha 0.05 no such interval exists: then it
    reaches from 0 to infinity.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    n = len(ordered)
    if n == 0:
        return math.nan, 0.0, math.inf
    tail, k, term = 0.0, 0, 0.5**n
    while tail + term <= alpha / 2 and k < n // 2:
        tail += term
        k += 1
        term *= (n - k + 1) / k
    if k == 0:
        return float(np.median(ordered)), 0.0, math.inf
    return float(np.median(ordered)), float(ordered[k - 1]), float(ordered[n - k])


def speedup(baseline_s: Sequence[float], candidate_s: Sequence[float], alpha: float = 0.05) -> Interval:
    """Speed-up from pairs: median of the paired ratios and its interval."""
    ratios = np.asarray(baseline_s, dtype=float) / np.asarray(candidate_s, dtype=float)
    estimate, low, high = median_interval(ratios.tolist(), alpha)
    return Interval(estimate, low, min(high, 1e9), len(ratios))


def least_pairs(alpha: float = 0.05) -> int:
    """Pairs below which `median_interval` has no end on either side."""
    return math.ceil(math.log2(2 / alpha))


def spread_of(same: Sequence[float]) -> float:
    """Standard deviation of the log of an estimate over fresh processes, from A/A estimates; half of 1 % at least.

    Pairs of one verdict share their processes, and with them what page layout and placement do to a time: the interval
    over pairs does not know of it, A/A estimates of other verdicts do. With fewer than three of them 2 % is assumed,
    which is what a machine with other work on it shows.
    """
    if len(same) < 3:
        return 0.02
    logs = np.clip(np.log(np.asarray(same, dtype=float)), -0.1, 0.1)  # one busy moment is not the machine
    return max(0.005, float(np.sqrt(np.square(logs).mean())))


def widened(interval: Interval, spread: float, alpha: float = 0.05) -> Interval:
    """The interval with the spread between processes added to it, in quadrature on the log scale."""
    if not 0 < interval.low <= interval.estimate <= interval.high < 1e9:
        return interval
    more = NormalDist().inv_cdf(1 - alpha / 2) * spread
    below, above = (math.hypot(math.log(interval.estimate / end), more) for end in (interval.low, interval.high))
    low, high = interval.estimate * math.exp(-below), interval.estimate * math.exp(above)
    return Interval(interval.estimate, low, high, interval.n)


def shrunk(interval: Interval, alpha: float = 0.05) -> float:
    """The estimate moved towards 1 by as much of its log as its own uncertainty explains.

    Empirical Bayes with a normal prior around no gain, whose variance is what the estimate shows beyond its error
    (Efron and Morris 1973, the positive-part rule): a gain of g standard errors keeps the share 1 − 1/g² of its log.
    """
    if not 0 < interval.low <= interval.high < 1e9:
        return min(1.0, interval.estimate)
    gain = math.log(interval.estimate)
    error = math.log(interval.high / interval.low) / (2 * NormalDist().inv_cdf(1 - alpha / 2))
    return math.exp(gain * max(0.0, 1 - (error / gain) ** 2)) if gain else 1.0


def claim(baseline_s: Sequence[float], candidate_s: Sequence[float]) -> float:
    """The least of the ratios of medians, lower quartiles, trimmed totals, and the paired median."""
    b, c = np.asarray(baseline_s, dtype=float), np.asarray(candidate_s, dtype=float)

    def trimmed(times: np.ndarray) -> float:
        return float(np.sort(times)[: max(1, math.ceil(0.9 * len(times)))].sum())

    return float(
        min(
            np.median(b) / np.median(c),
            np.quantile(b, 0.25) / np.quantile(c, 0.25),
            trimmed(b) / trimmed(c),
            np.median(b / c),
        )
    )


def alpha_of_try(number: int, total: float = 0.05) -> float:
    """Level of the `number`-th test (from 1) such that over all tests, however many, one false keep has chance `total`.

    Alpha spending by the series 6/(π² k²) = 1, which Bonferroni's inequality makes valid without independence and
    without knowing the number of tests (Foster & Stine 2008 call it the simplest alpha-investing rule). Only confirming
    measurements are tests: they use fresh data; screens merely choose what is confirmed.
    """
    return total * 6 / (math.pi**2 * number**2)
