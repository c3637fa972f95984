"""What a measurement lets us say: intervals on ratios, exact tests, and what drop a test could have seen.

Ratios of paired rounds are analysed on the log scale, so that "twice as fast" and "half as fast" lie equally far from
"the same". With the few rounds that fit into a budget a bootstrap resamples the same handful of numbers and its
intervals come out too narrow; the t interval does not, so it is what decides. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import optimize, stats

from profiles.records import Record


class RatioInterval(Record):
    """A ratio (1 is "the same") with its interval."""

    estimate: float
    """Geometric mean of the paired ratios."""
    low: float
    high: float
    n: int
    """How many pairs."""
    level: float
    """Two-sided confidence level of [low, high]."""


def log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> np.ndarray:
    """Natural logarithms of the pairwise ratios, float64 of shape [pairs].

    Raises:
        ValueError: lengths differ, no pairs, or a value that is not finite and positive.
    """
    top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    if top.shape != bottom.shape or top.ndim != 1 or top.size == 0:
        raise ValueError(f"need two equally long, non-empty lists, got {top.shape} and {bottom.shape}")
    values = np.concatenate([top, bottom])
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("a ratio needs finite, positive values")
    return np.log(top / bottom)


def interval_of_logs(logs: Sequence[float] | np.ndarray, level: float = 0.95) -> RatioInterval | None:
    """Student's t interval on the geometric mean of ratios, given their logarithms; None for fewer than two."""
    _check_level(level)
    values = np.asarray(logs, dtype=float)
    if values.size < 2:
        return None
    mean = float(values.mean())
    half = float(stats.t.ppf((1 + level) / 2, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))
    # exp() of more than this is beyond any speed-up and would overflow
    low, high = math.exp(max(mean - half, -300.0)), math.exp(min(mean + half, 300.0))
    return RatioInterval(estimate=math.exp(mean), low=low, high=high, n=values.size, level=level)


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95
) -> RatioInterval | None:
    """Interval on the geometric mean of `numerators[i] / denominators[i]`; None for fewer than two pairs.

    Raises:
        ValueError: as for `log_ratios`.
    """
    return interval_of_logs(log_ratios(numerators, denominators), level)


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95, *, seed: int = 0
) -> RatioInterval:
    """The same by BCa bootstrap over pairs (scipy), for many pairs whose ratios are far from normal; at least 8.

    Raises:
        ValueError: fewer than 8 pairs, or as for `log_ratios`.
    """
    logs = log_ratios(numerators, denominators)
    if logs.size < 8:
        raise ValueError(f"{logs.size} pairs are too few for a bootstrap; use paired_ratio")
    mean = float(logs.mean())
    if np.ptp(logs) == 0:
        low = high = mean
    else:
        found = stats.bootstrap((logs,), np.mean, confidence_level=level, method="BCa", rng=np.random.default_rng(seed))
        low, high = float(found.confidence_interval.low), float(found.confidence_interval.high)
    return RatioInterval(estimate=math.exp(mean), low=math.exp(low), high=math.exp(high), n=logs.size, level=level)


def geometric_mean(ratios: Sequence[float]) -> tuple[float, int]:
    """Geometric mean of ratios and how many there were; the only mean of ratios that this project prints."""
    logs = log_ratios(ratios, [1.0] * len(ratios))
    return math.exp(float(logs.mean())), logs.size


def relative_spread(values: Sequence[float]) -> float:
    """(largest − smallest) / median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    return float(np.ptp(values) / np.median(values))


def self_spread(values: Sequence[float]) -> float:
    """A/A spread of one engine measured against itself: typical |log ratio| of one round to the next; 0 for one round.

    The root mean square of the log ratios of neighbouring rounds divided by √2, which is the standard deviation of one
    round and, unlike that of all rounds about their mean, takes no part of a slow drift (von Neumann's mean square
    successive difference).
    """
    if len(values) < 2:
        return 0.0
    steps = log_ratios(values[1:], values[:-1])
    return float(math.sqrt(float((steps**2).mean()) / 2))


def difference_of_logs(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Mean(second) − mean(first) of log ratios, and the one-sided p value that it is below zero by chance alone.

    Student's two-sample t test with pooled variance: hidden and visible rounds come from the same machine in the same
    minutes. Needs three values in all; with fewer, p is 1.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    difference = float(b.mean() - a.mean())
    if a.size + b.size < 3:
        return difference, 1.0
    pooled = (((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()) / (a.size + b.size - 2)
    error = math.sqrt(pooled * (1 / a.size + 1 / b.size))
    if error == 0:
        return difference, 0.0 if difference < 0 else 1.0
    return difference, float(stats.t.cdf(difference / error, a.size + b.size - 2))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact McNemar p value from the discordant pairs (binomial with p = 1/2); 1 when there are none."""
    if only_first + only_second == 0:
        return 1.0
    return float(stats.binomtest(only_first, only_first + only_second, 0.5).pvalue)


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion.

    Raises:
        ValueError: `n` is not positive, or `successes` is not within [0, n].
    """
    _check_level(level)
    interval = stats.binomtest(successes, n).proportion_ci(confidence_level=level, method="wilson")
    return float(interval.low), float(interval.high)


def minimum_detectable_drop(proportion: float, n: int, level: float = 0.95, power: float = 0.8) -> float | None:
    """Smallest drop below `proportion` that `n` independent trials would show, with probability `power`, at `level`.

    The normal approximation of the one-sided one-sample test: z_level·√(p₀q₀/n) + z_power·√(p₁q₁/n) = p₀ − p₁.
    With p₀ = 0.957 and n = 200 it gives 4.3 points: such a test cannot enforce "99 % of the reference".

    Returns:
        The drop, or None when even a drop to zero would not be seen.
    """
    if n <= 0 or not 0 < proportion <= 1:
        raise ValueError(f"need n > 0 and 0 < proportion <= 1, got n={n}, proportion={proportion}")
    z_level, z_power = stats.norm.ppf(level), stats.norm.ppf(power)

    def excess(drop: float) -> float:
        low = proportion - drop
        # a proportion of exactly 1 has no variance; one failure in n is the least that could be seen
        here = max(proportion * (1 - proportion), 1 / n * (1 - 1 / n) if n > 1 else 0.25)
        return drop - z_level * math.sqrt(here / n) - z_power * math.sqrt(low * (1 - low) / n)

    if excess(proportion) < 0:
        return None
    return float(optimize.brentq(excess, 0.0, proportion))


def detectable_difference(standard_error: float, level: float = 0.95, power: float = 0.8) -> float:
    """Smallest true difference that a one-sided test at `level` shows with probability `power`, by its standard error.

    (z_level + z_power) · standard error.
    """
    return float((stats.norm.ppf(level) + stats.norm.ppf(power)) * standard_error)


def keep_level(test: int, alpha: float = 0.05) -> float:
    """Two-sided confidence level for the `test`-th promotion test of a run (1, 2, …), so that the run as a whole keeps
    something that is no gain with probability at most `alpha`, however many tests follow.

    Alpha spending over an endless sequence: test i may spend αᵢ = α·6/(π²·i²), and Σαᵢ = α. By the union bound that
    holds under any dependence between the tests and whatever made the loop stop, which a loop whose next idea depends
    on its last result needs (the sequence is the one of Foster and Stine, "α-investing", JRSS B 70, 2008, and of the
    LOND procedure of Javanmard and Montanari, 2015; those control the false discovery *rate* and spend more after a
    discovery; we control the chance of a single false keep, so we never earn any back). A false keep happens on one
    side only (lower end above the threshold), hence level = 1 − 2αᵢ.
    """
    if test < 1 or not 0 < alpha < 0.5:
        raise ValueError(f"need test >= 1 and 0 < alpha < 0.5, got {test} and {alpha}")
    return 1 - 2 * alpha * 6 / (math.pi**2 * test**2)


def level_per_look(level: float, looks: int) -> float:
    """Level at each of `looks` looks at the growing data, so that stopping at the first decision keeps `level`.

    Bonferroni: (1 − level)/looks each. Somewhat wider than Pocock's bounds, and true for t intervals of small n.
    """
    _check_level(level)
    return 1 - (1 - level) / max(looks, 1)


def decided(interval: RatioInterval | None, threshold: float) -> Literal["above", "below"] | None:
    """Whether the whole interval lies on one side of `threshold`; None while it does not, or while there is none."""
    if interval is None:
        return None
    if interval.low > threshold:
        return "above"
    return "below" if interval.high < threshold else None


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"a confidence level lies between 0 and 1, got {level}")
