"""The offline executor against a judge whose answers are known, and once against the real ruler."""

from __future__ import annotations

import dataclasses
import time

import pytest

from kb.records import Attempt, CrashSet, Idea
from kernels.problems import build
from kernels.ruler.verdict import Interval, ShapeResult, Verdict
from kernels.templates import family
from tasks.agents.offline import OfflineExecutor, winning_shapes, wins
from tasks.agents.protocol import CampaignTask, WarmStart

PROBLEM = build("linear", n=64, k=64, visible=[{"m": 8}, {"m": 64}], seed=0)
IDEA = Idea(
    id="i", run_id="r", hypothesis="h", layer="kernel", lever="linear × template", operator="linear",
    approach="template:linear_bf16", time_share=0.5, headroom=3.0, derivation="d",
)  # fmt: skip
QUICK = OfflineExecutor(patience=6, max_screens=20)


def warm_start(parameters):
    return WarmStart(parameters=parameters, lesson_id="l", distance=0.0, relaxed=(), note="")


def task_for(tmp_path, **more):
    given = {
        "campaign_id": "c", "idea": IDEA, "problem": PROBLEM, "families": ("linear_bf16",), "languages": ("cpp",),
        "budget_s": 30.0, "seed": 7, "threads": 99, "builds": tmp_path,
    }  # fmt: skip
    return CampaignTask(**(given | more))


def verdict_for(candidate, mode, speedup, status="valid", slow_shape=False):
    if status != "valid":
        return Verdict(status, mode, PROBLEM.name, PROBLEM.id, candidate.id, reason=f"it is {status}")
    interval = Interval(speedup, speedup * 0.95, speedup * 1.05, 20)
    rows = tuple(
        ShapeResult(
            shape=shape, speedup=interval, claim=speedup, baseline_s=1.0, candidate_s=1 / speedup, floor_s=None,
            floor_fraction=None, overhead_fraction=0.0, calls_per_handshake=1, baseline="eager",
            faster=interval.low > 1.02 and not (slow_shape and place),
        )
        for place, shape in enumerate(PROBLEM.visible)
    )  # fmt: skip
    return Verdict(
        status, mode, PROBLEM.name, PROBLEM.id, candidate.id, speedup=interval, claim=speedup * 0.9, threshold=1.02,
        faster=interval.low > 1.02, per_shape=rows,
    )  # fmt: skip


class Bench:
    """A judge that likes wide blocks and many rows, and remembers what it was asked."""

    def __init__(self, score=None, status=None, **more):
        self.score = score or (lambda p: 0.5 + p["columns"] / 32 + p["rows"] / 12)
        self.status = status or (lambda p: "valid")
        self.more = more
        self.asked = []
        self.reported: list[Attempt] = []

    def judge(self, candidate, mode):
        self.asked.append((mode, dict(candidate.parameters)))
        return verdict_for(
            candidate, mode, self.score(candidate.parameters), self.status(candidate.parameters), **self.more
        )

    def run(self, task, executor=QUICK):
        return executor.run(task, self.judge, self.reported.append)

    def screened(self):
        return [parameters for mode, parameters in self.asked if mode == "screen"]


def test_default_goes_first_and_the_best_is_confirmed(tmp_path):
    bench = Bench()
    result = bench.run(task_for(tmp_path))
    assert result.conclusion == "won"
    assert bench.screened()[0] == dict(family("linear_bf16").default)
    best = bench.asked[-1][1]
    assert bench.asked[-1][0] == "confirm"
    assert result.candidate.parameters == best
    assert bench.score(best) == max(map(bench.score, bench.screened())) > bench.score(bench.screened()[0])
    assert result.verdict.mode == "confirm"
    assert result.shapes == PROBLEM.visible
    assert list(result.attempts) == bench.reported
    assert [a.number for a in result.attempts] == list(range(1, len(result.attempts) + 1))


def test_a_screen_that_was_not_resolved_still_says_what_to_confirm(tmp_path):
    """Unresolved is a bad measurement, not a bad candidate; only the confirmation has to be sound."""

    class Busy(Bench):
        def judge(self, candidate, mode):
            verdict = super().judge(candidate, mode)
            return verdict if mode == "confirm" else dataclasses.replace(verdict, status="unresolved")

    bench = Busy()
    result = bench.run(task_for(tmp_path))
    assert result.conclusion == "won"
    assert bench.score(dict(result.candidate.parameters)) == max(map(bench.score, bench.screened()))


def test_same_seed_same_campaign_other_seed_another(tmp_path):
    asked = []
    for seed in (7, 7, 8):
        bench = Bench()
        bench.run(task_for(tmp_path, seed=seed))
        asked.append(bench.asked)
    assert asked[0] == asked[1] != asked[2]


def test_no_candidate_is_screened_twice(tmp_path):
    bench = Bench()
    bench.run(task_for(tmp_path), OfflineExecutor(patience=40, max_screens=40))
    seen = [tuple(p.items()) for p in bench.screened()]
    assert len(seen) == len(set(seen)) == 40


@pytest.mark.parametrize("killed_after", [1, 3, 8])
def test_a_killed_campaign_goes_on_where_it_was(tmp_path, killed_after):
    whole = Bench()
    expected = whole.run(task_for(tmp_path))
    finished = tuple(whole.reported[:killed_after])
    again = Bench()
    result = again.run(task_for(tmp_path, finished=finished))
    assert again.asked == whole.asked[killed_after:]
    assert [(a.number, a.candidate_id, a.mode) for a in result.attempts] == [
        (a.number, a.candidate_id, a.mode) for a in expected.attempts
    ]
    assert result.candidate.id == expected.candidate.id


def test_crashes_of_an_earlier_run_are_tried_again(tmp_path):
    crashing = Bench(status=lambda p: "crashed")
    crashing.run(task_for(tmp_path))
    again = Bench()
    again.run(task_for(tmp_path, finished=tuple(crashing.reported)))
    assert again.screened()[0] == crashing.screened()[0]
    assert min(a.number for a in again.reported) > max(a.number for a in crashing.reported)


def test_warm_starts_come_right_after_the_default(tmp_path):
    warm = {**family("linear_bf16").default, "columns": 64, "rows": 6}
    starts = (
        warm_start({**warm, "columns": 33}),
        warm_start({"family": "linear_bf16", **warm}),
    )
    bench = Bench()
    bench.run(task_for(tmp_path, warm_starts=starts))
    assert bench.screened()[1] == warm


def test_crash_sets_are_never_tried(tmp_path):
    held = CrashSet(
        id="x", scope={}, combination={"family": "linear_bf16", "columns": 64}, failure="crash", detail="", versions={}
    )
    bench = Bench()
    result = bench.run(task_for(tmp_path, crash_sets=(held,)), OfflineExecutor(patience=30, max_screens=30))
    assert all(p["columns"] != 64 for p in bench.screened())
    assert result.constraints["crash_sets_skipped"] > 0


def test_one_that_fails_to_confirm_is_followed_by_the_next(tmp_path):
    bench = Bench()
    top = {}

    def judge(candidate, mode):
        verdict = bench.judge(candidate, mode)
        if mode == "confirm" and not top:
            top.update(candidate.parameters)
            return verdict_for(candidate, mode, 1.0)
        return verdict

    result = QUICK.run(task_for(tmp_path), judge, bench.reported.append)
    assert result.conclusion == "won"
    assert dict(result.candidate.parameters) != top


def test_conclusions_say_why(tmp_path):
    slow = Bench(score=lambda p: 0.9).run(task_for(tmp_path))
    assert (slow.conclusion, slow.candidate is not None) == ("did_not_win", True)
    assert "0.90×" in slow.reason
    wrong = Bench(status=lambda p: "incorrect").run(task_for(tmp_path))
    assert wrong.conclusion == "refused"
    assert "incorrect" in wrong.reason
    noisy = Bench(status=lambda p: "unresolved").run(task_for(tmp_path))
    assert noisy.conclusion == "failed"
    none = Bench().run(task_for(tmp_path, problem=build("linear", dtype="float32", n=8, k=8, visible=[{"m": 1}])))
    assert none.conclusion == "failed"
    python = Bench().run(task_for(tmp_path, languages=("torch",)))
    assert python.conclusion == "failed"


def test_only_winning_shapes_are_handed_on(tmp_path):
    result = Bench(slow_shape=True).run(task_for(tmp_path))
    assert result.conclusion == "won"
    assert result.shapes == ({"m": 8},)


def test_a_vendor_call_does_not_win():
    candidate = family("linear_bf16").render(family("linear_bf16").default, PROBLEM)
    good = verdict_for(candidate, "confirm", 2.0)
    assert wins(good)
    assert len(winning_shapes(good)) == 2
    assert not wins(dataclasses.replace(good, provenance={"verdict": "vendor"}))
    assert not wins(dataclasses.replace(good, faster=False))


def test_the_budget_ends_screening_but_not_the_first_verdict(tmp_path):
    bench = Bench()

    def judge(candidate, mode):
        time.sleep(0.05)
        return bench.judge(candidate, mode)

    result = QUICK.run(task_for(tmp_path, budget_s=0.2), judge, bench.reported.append)
    assert 1 <= len(bench.screened()) <= 4
    assert result.conclusion == "won"
    spent = Bench()
    assert spent.run(task_for(tmp_path, budget_s=0.0)).attempts
    assert len(spent.screened()) == 1


def test_builds_ahead_where_a_core_is_free(tmp_path):
    task = task_for(tmp_path, threads=0)
    Bench().run(task, OfflineExecutor(patience=2, max_screens=2))
    assert list(tmp_path.glob("*.so"))


@pytest.mark.slow
def test_tunes_a_real_kernel_under_the_real_ruler(tmp_path):
    from kernels.ruler.judge import judge

    problem = build("linear", n=576, k=576, visible=[{"m": 8}], seed=1)
    task = task_for(tmp_path, problem=problem, budget_s=60.0, threads=1)

    def real(candidate, mode):
        return judge(problem, candidate, mode=mode, ceilings=None, threads=1, builds=tmp_path, budget_s=20.0)

    reported: list[Attempt] = []
    result = OfflineExecutor(patience=3, max_screens=3).run(task, real, reported.append)
    assert result.conclusion == "won", result.reason
    assert result.verdict.claim > 1.0


def test_what_a_step_meets_again_only_after_all_weights_is_cold(tmp_path):
    from types import SimpleNamespace

    from tasks.lab import Lab

    attention = build("attention_decode", visible=[{"batch": 8, "length": 256}], seed=0, heads=9, kv_heads=3, dim=64)
    softmax = build("softmax", visible=[{"rows": 8, "cols": 256}], seed=0)
    file = tmp_path / "model.safetensors"
    for size, states in ((1 << 10, ["warm"] * 3), (1 << 40, ["cold", "cold", "warm"])):
        with file.open("wb") as out:
            out.truncate(size)  # a sparse file
        lab = SimpleNamespace(model_dir=tmp_path)
        assert [Lab.cache_state(lab, problem) for problem in (PROBLEM, attention, softmax)] == states
