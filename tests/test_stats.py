"""The statistics against textbook figures and against simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles import stats


def test_paired_ratio_by_hand():
    # logs: ln 1.1, ln 1.2, ln 1.3; t(0.975, 2) = 4.302653
    logs = [math.log(1.1), math.log(1.2), math.log(1.3)]
    mean = sum(logs) / 3
    sd = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    half = 4.302653 * sd / math.sqrt(3)
    found = stats.paired_ratio([110, 240, 390], [100, 200, 300])
    assert found is not None
    assert found.estimate == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    assert found.low == pytest.approx(math.exp(mean - half), rel=1e-6)
    assert found.high == pytest.approx(math.exp(mean + half), rel=1e-6)
    assert found.n == 3


def test_one_pair_has_no_interval():
    assert stats.paired_ratio([2.0], [1.0]) is None
    assert stats.decided(None, 1.0) is None


@pytest.mark.parametrize("bad", [([1.0], [0.0]), ([1.0], [math.nan]), ([1.0, 2.0], [1.0]), ([], []), ([-1.0], [1.0])])
def test_ratios_refuse_what_has_no_ratio(bad):
    with pytest.raises(ValueError, match=r"need|finite"):
        stats.paired_ratio(*bad)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=2, max_size=12))
def test_swapping_sides_inverts_the_interval(pairs):
    a, b = zip(*pairs, strict=True)
    forth, back = stats.paired_ratio(a, b), stats.paired_ratio(b, a)
    assert forth.low == pytest.approx(1 / back.high, rel=1e-6)
    assert forth.low <= forth.estimate * (1 + 1e-12)


def test_t_interval_covers_where_the_bootstrap_would_not():
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(600):
        logs = rng.normal(0.05, 0.03, 4)
        found = stats.interval_of_logs(logs)
        inside += found.low <= math.exp(0.05) <= found.high
    assert 0.92 < inside / 600 < 0.98


def test_bootstrap_agrees_on_many_pairs_and_refuses_few():
    rng = np.random.default_rng(5)
    a = np.exp(rng.normal(0.1, 0.05, 60))
    by_t, by_bootstrap = stats.paired_ratio(a, np.ones(60)), stats.bootstrap_ratio(a, np.ones(60))
    assert by_bootstrap.low == pytest.approx(by_t.low, rel=0.01)
    assert by_bootstrap.high == pytest.approx(by_t.high, rel=0.01)
    with pytest.raises(ValueError, match="too few"):
        stats.bootstrap_ratio([1, 2, 3], [1, 1, 1])


def test_geometric_mean_carries_n():
    assert stats.geometric_mean([2.0, 8.0]) == (pytest.approx(4.0), 2)


def test_self_spread_ignores_drift_but_not_noise():
    drifting = [100 * 1.01**i for i in range(10)]
    assert stats.self_spread(drifting) == pytest.approx(math.log(1.01) / math.sqrt(2), rel=1e-6)
    rng = np.random.default_rng(1)
    assert stats.self_spread(list(np.exp(rng.normal(0, 0.05, 4000)))) == pytest.approx(0.05, rel=0.05)
    assert stats.self_spread([1.0]) == 0.0


def test_wilson_and_mcnemar_textbook():
    low, high = stats.wilson(15, 20)
    assert (low, high) == (pytest.approx(0.5313, abs=1e-3), pytest.approx(0.8881, abs=1e-3))
    assert stats.mcnemar(1, 9) == pytest.approx(0.021484, abs=1e-5)
    assert stats.mcnemar(0, 0) == 1.0


def test_gsm8k_with_200_questions_cannot_enforce_99_percent():
    drop = stats.minimum_detectable_drop(0.957, 200)
    assert drop > 0.01 * 0.957
    assert drop == pytest.approx(0.043, abs=0.004)
    assert stats.minimum_detectable_drop(0.957, 20_000) < 0.0096
    assert stats.minimum_detectable_drop(0.5, 1) is None


def test_stated_power_holds_in_simulation():
    drop = stats.minimum_detectable_drop(0.9, 400)
    rng = np.random.default_rng(7)
    seen = rng.binomial(400, 0.9 - drop, 4000) / 400
    rejects = seen < 0.9 - 1.6449 * math.sqrt(0.9 * 0.1 / 400)
    assert rejects.mean() == pytest.approx(0.8, abs=0.04)


def test_a_run_spends_no_more_than_alpha():
    spent = [(1 - stats.keep_level(i)) / 2 for i in range(1, 5000)]
    assert sum(spent) < 0.05
    assert sum(spent) == pytest.approx(0.05, rel=1e-3)
    assert stats.keep_level(2) > stats.keep_level(1)
    with pytest.raises(ValueError, match="test"):
        stats.keep_level(0)


def test_a_loop_of_twenty_useless_ideas_rarely_keeps_one():
    rng = np.random.default_rng(11)
    runs, false_keeps = 300, 0
    for _ in range(runs):
        kept = False
        for i in range(1, 21):
            logs, level = rng.normal(0, 0.03, 8), stats.level_per_look(stats.keep_level(i), 3)
            looks = [stats.interval_of_logs(logs[:n], level) for n in (4, 6, 8)]
            kept = kept or any(stats.decided(look, 1.0) == "above" for look in looks)
        false_keeps += kept
    assert false_keeps / runs < 0.08


def test_difference_finds_a_gain_that_is_only_visible():
    gone, p = stats.difference_of_logs([0.69, 0.70], [0.0, 0.01])
    assert gone == pytest.approx(-0.69)
    assert p < 0.01
    _, same = stats.difference_of_logs([0.30, 0.33], [0.31, 0.29])
    assert same > 0.1
    assert stats.difference_of_logs([0.5], [0.0])[1] == 1.0
