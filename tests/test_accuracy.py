"""The clean reference against the model's own table, and the gate's answers."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from profiles import accuracy
from profiles.accuracy import Distance, RequestScore, Sample, Witness
from profiles.engines.base import EngineFailure, OverlayCount
from profiles.reference import Reference
from profiles.workload import AccuracyGate
from tests.scripted_engine import VOCABULARY

GATE = AccuracyGate()


@pytest.fixture
def model(scripted_model):
    return scripted_model


@pytest.fixture
def reference(scripted_reference):
    return scripted_reference


def test_scores_are_those_of_the_model(reference, model):
    table = model[1]
    rng = np.random.default_rng(0)
    items = [
        (rng.integers(0, VOCABULARY, p).tolist(), rng.integers(0, VOCABULARY, n).tolist())
        for p, n in ((3, 5), (9, 2), (1, 7), (4, 1))
    ]
    items[1][1][:] = [int(table[items[1][0][-1]].argmax()), 5]
    for (prompt, tokens), score in zip(items, reference.score(items), strict=True):
        before = [prompt[-1], *tokens[:-1]]
        assert score.logprob == pytest.approx(table[before, tokens], abs=1e-4)
        assert score.best == pytest.approx(table[before].max(-1), abs=1e-4)
        assert score.top1.tolist() == (table[before].argmax(-1) == tokens).tolist()
    assert reference.score(items)[1].top1[0]


def test_tokens_that_do_not_exist_fail_the_gate(reference):
    (score,) = reference.score([([1, 2], [3, VOCABULARY + 5, 4])])
    assert np.isnan(score.logprob).tolist() == [False, True, True]
    bad = accuracy.sample(reference, [("0", [1, 2], [3, VOCABULARY + 5, 4]), ("1", [1], [])])
    verdict = accuracy.judge(GATE, Distance(sample=bad, witness=ok_kl()), Distance(sample=honest(), witness=ok_kl()))
    assert verdict.status == "fail"
    assert "1 empty outputs, 1 with tokens" in verdict.reason


def test_the_reference_sleeps_between_questions_and_dies_with_its_owner(model, tmp_path):
    with Reference(model[0], children=tmp_path, log=tmp_path / "log", threads=1) as one:
        process = psutil.Process(one.pid)
        for _ in range(2):
            end = time.monotonic() + 10
            while process.status() != psutil.STATUS_STOPPED and time.monotonic() < end:
                time.sleep(0.01)
            assert process.status() == psutil.STATUS_STOPPED
            one.score([([1], [2])])
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineFailure):
            one.score([([1], [2])])
    assert not process.is_running()
    with pytest.raises(EngineFailure, match="cannot load"):
        Reference(tmp_path / "nowhere", children=tmp_path, log=tmp_path / "log").start()


def test_witness_distance_is_the_kl_of_the_tables(reference, model, tmp_path):
    table = model[1]
    sequences = np.random.default_rng(1).integers(0, VOCABULARY, (3, 9))
    right = table[sequences[:, 3:-1]]
    np.save(tmp_path / "right.npy", right)
    found = reference.witness_distance(sequences.tolist(), 4, tmp_path / "right.npy")
    assert found.problem == ""
    assert found.kl_nats == pytest.approx([0, 0, 0], abs=1e-5)
    assert found.agreement.tolist() == [1, 1, 1]
    flat = np.full_like(right, -np.log(VOCABULARY))
    np.save(tmp_path / "flat.npy", flat)
    found = reference.witness_distance(sequences.tolist(), 4, tmp_path / "flat.npy")
    expected = (np.exp(right) * (right - flat)).sum(-1).mean(-1)
    assert found.kl_nats == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ["nan", "shape", "sum", "pickle", "missing"])
def test_broken_witnesses_are_named(reference, model, tmp_path, kind):
    sequences = [[1, 2, 3, 4]]
    values = model[1][np.array(sequences)[:, 1:-1]]
    file = tmp_path / "w.npy"
    if kind == "nan":
        values = values.copy()
        values[0, 0, 7] = np.nan
    if kind == "shape":
        values = values[:, :1]
    if kind == "sum":
        values = values + 0.5
    if kind == "pickle":
        values = np.array([{"a": 1}], dtype=object)
    if kind != "missing":
        np.save(file, values, allow_pickle=True)
    words = {"nan": "NaN", "shape": "not float32", "sum": "sum to 1", "pickle": "cannot be read"}
    assert words.get(kind, "cannot be read") in reference.witness_distance(sequences, 2, file).problem
    broken = Distance(sample=honest(), witness=Witness(problem="it is NaN"))
    assert accuracy.judge(GATE, broken, stock()).status == "fail"
    assert accuracy.judge(GATE, stock(), broken).status == "cannot_evaluate"


def honest(n=16, tokens=128, regret=0.0005, top1=125, noise=1, distinct=0.6, prefix="", seed=0):
    rng = np.random.default_rng(seed)
    return Sample(
        requests=[
            RequestScore(
                key=f"{prefix}{i}", tokens=tokens, regret_nats=max(regret * (1 + 0.1 * rng.normal()), 0),
                top1=min(int(top1 + rng.integers(-noise, noise + 1)), tokens), distinct=distinct,
            )
            for i in range(n)
        ]
    )  # fmt: skip


def ok_kl(value=8e-4):
    return Witness(kl_nats=[value * f for f in (0.9, 1.1, 1.0, 1.05)], agreement=[1, 1, 1, 0.97])


def stock():
    return Distance(sample=honest(), witness=ok_kl())


def verdict(sample=None, kl=None, **more):
    engine = Distance(sample=sample or honest(seed=1), witness=kl or ok_kl())
    return accuracy.judge(GATE, engine, stock(), **more)


def check(found, name):
    return next(c for c in found.checks if c.name == name)


def test_an_equal_engine_passes_with_its_power_stated():
    found = verdict()
    assert found.status == "pass", found.reason
    assert "would have been seen" in found.reason
    assert 0 < check(found, "top1_share_drop").detectable < 0.02
    same = accuracy.judge(GATE, stock(), stock())
    assert check(same, "top1_share_drop").detectable >= 1 / 2048
    assert verdict(honest(prefix="other", seed=2)).status == "pass"  # not the same prompts: unpaired


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        (honest(regret=0.03), "regret_increase_nats"),
        (honest(top1=119), "top1_share_drop"),
        (honest(distinct=0.1), "distinct_ratio"),
    ],
)
def test_each_worsening_fails_its_own_check(sample, name):
    found = verdict(sample)
    assert found.status == "fail"
    assert [c.name for c in found.checks if c.status == "fail"] == [name]


def test_kl_is_relative_to_stock():
    assert verdict(kl=ok_kl(0.0056)).status == "pass"
    assert check(verdict(kl=ok_kl(0.0062)), "kl_increase_nats").status == "fail"


def test_too_few_tokens_are_unknown_and_not_a_pass():
    few = verdict(honest(n=1, seed=3))
    assert few.status == "cannot_evaluate"
    assert "unknown" in few.reason or "single request" in few.reason

    def dropped(*drops):
        requests = honest().requests
        return Sample(
            requests=[r.model_copy(update={"top1": r.top1 - drops[i % len(drops)]}) for i, r in enumerate(requests)]
        )  # fmt: skip

    noisy = verdict(dropped(-3, 4, -9, 10))  # half a token worse, give or take two
    assert noisy.status == "cannot_evaluate"
    assert "too few tokens" in noisy.reason
    close = dropped(-1, 3)  # one token of 128 worse, the limit is 1.25
    assert verdict(close).status == "pass"
    strict = verdict(close, strict=True)
    assert strict.status == "cannot_evaluate"
    assert "resolve" in strict.reason


def test_what_could_not_be_asked_blocks():
    found = verdict(kl=Witness(unavailable="refused: no log-probabilities over HTTP"))
    assert found.status == "cannot_evaluate"
    assert "refused" in found.reason
    assert verdict(Sample()).status == "cannot_evaluate"
    off = accuracy.judge(AccuracyGate(enabled=False), Distance(sample=Sample()), Distance(sample=Sample()))
    assert off.status == "pass"
    assert "off" in off.reason


def test_a_promoted_kernel_that_never_ran_fails():
    counts = [OverlayCount(problem="p", candidate="abc", sites=1, taken=3, fell_back=0)]
    assert verdict(counts=counts, required=["abc"]).status == "pass"
    found = verdict(counts=counts, required=["abc", "def"])
    assert found.status == "fail"
    assert "def was called 0 times" in found.reason


def test_model_folder_is_untouched(model):
    assert sorted(p.name for p in Path(model[0]).iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "table.npy",
    ]  # fmt: skip
