"""The numbers: paired ratios, their interval, the conservative claim, and error control over many tries."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
