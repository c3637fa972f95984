"""The ruler's numbers: intervals, claims and error control, against simulation and by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kernels.ruler import stats
from kernels.ruler.verdict import Interval
from tasks.judge import Notebook


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(3)
    for alpha, n in ((0.05, 6), (0.05, 17), (0.01, 30)):
        hits = 0
        for _ in range(4000):
            _, low, high = stats.median_interval(rng.lognormal(0, 0.3, n).tolist(), alpha)
            hits += low <= 1.0 <= high
        assert hits / 4000 > 1 - alpha - 0.006


@pytest.mark.parametrize("alpha", [0.05, stats.alpha_of_try(1), stats.alpha_of_try(2), stats.alpha_of_try(5)])
def test_below_the_least_number_of_pairs_there_is_no_interval(alpha):
    least = stats.least_pairs(alpha)
    values = [1.0 + i / 100 for i in range(least)]
    assert stats.median_interval(values, alpha)[1] > 0
    assert stats.median_interval(values[:-1], alpha)[1:] == (0.0, math.inf)


def test_all_tries_together_spend_five_percent():
    assert sum(stats.alpha_of_try(k) for k in range(1, 100_000)) == pytest.approx(0.05, rel=1e-4)
    assert all(stats.alpha_of_try(k) > stats.alpha_of_try(k + 1) for k in range(1, 20))


def test_an_interval_knows_of_the_spread_between_processes():
    """Pairs of one verdict share an offset that they cannot see; A/A estimates have seen such offsets."""
    rng = np.random.default_rng(5)
    offsets = 0.02
    spread = stats.spread_of(np.exp(rng.normal(0, offsets, 60)).tolist())
    assert spread == pytest.approx(offsets, rel=0.3)
    plain = wide = 0
    for _ in range(2000):
        base, cand = np.exp(rng.normal(0, 0.01, 20)), np.exp(rng.normal(rng.normal(0, offsets), 0.01, 20)) / 1.5
        narrow = stats.speedup(base.tolist(), cand.tolist())
        full = stats.widened(narrow, spread)
        plain += narrow.low <= 1.5 <= narrow.high
        wide += full.low <= 1.5 <= full.high
        assert full.low < narrow.low <= full.estimate <= narrow.high < full.high
    assert plain / 2000 < 0.6
    assert wide / 2000 > 0.93


def test_the_spread_has_a_floor_and_one_busy_moment_is_not_the_machine():
    assert stats.spread_of([]) == stats.spread_of([1.0, 1.2]) == 0.02
    assert stats.spread_of([1.0] * 10) == 0.005
    assert stats.spread_of([*[1.0] * 59, 30.0]) < 0.02


def test_a_gain_is_shrunk_by_what_its_error_explains():
    sure, doubtful, none = Interval(2.0, 1.98, 2.02, 30), Interval(1.1, 1.0, 1.21, 30), Interval(1.01, 0.9, 1.13, 30)
    assert stats.shrunk(sure) == pytest.approx(2.0, rel=1e-3)
    assert 1.0 < stats.shrunk(doubtful) < 1.085
    assert stats.shrunk(none) == 1.0
    assert stats.shrunk(Interval(3.0, 0.0, 1e9, 3)) == 1.0  # no interval, no gain


def test_the_best_of_many_luckless_draws_is_shrunk_near_the_truth():
    """Twenty candidates without a gain: the luckiest estimate is well above 1, its shrunk value much less so."""
    rng = np.random.default_rng(8)
    raw, kept = [], []
    for _ in range(300):
        drawn = []
        for _ in range(20):
            drawn.append(
                stats.speedup(np.exp(rng.normal(0, 0.1, 12)).tolist(), np.exp(rng.normal(0, 0.1, 12)).tolist())
            )
        best = max(drawn, key=lambda interval: interval.estimate)
        raw.append(best.estimate)
        kept.append(stats.shrunk(best))
    assert np.mean(raw) > 1.06
    assert np.mean(kept) - 1 < 0.85 * (np.mean(raw) - 1)


def test_each_confirmation_of_a_campaign_has_a_level_of_its_own(tmp_path):
    notebook = Notebook(tmp_path)
    levels = []
    for number, mode in enumerate(["screen", "confirm", "screen", "confirm"], 1):
        levels.append(notebook._alpha())
        (tmp_path / "attempts").mkdir(exist_ok=True)
        (tmp_path / "attempts" / f"{number:04d}.json").write_text(json.dumps({"mode": mode}))
    levels.append(notebook._alpha())
    assert levels == [stats.alpha_of_try(k) for k in (1, 1, 2, 2, 3)]
