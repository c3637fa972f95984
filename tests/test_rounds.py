"""Parts of a round that need no engine: neighbours, which winners are tested in which order, when a compiler waits."""

from __future__ import annotations

import fcntl
import os
from types import SimpleNamespace

import pytest
from finished_run import profile

from flows import rounds
from flows.rounds import Costs, _by_operator
from kernels.problems import build as problem_of
from kernels.ruler.build import BuildFailed
from kernels.templates import families
from profiles.engines.base import Promoted, Settings, Stack
from tasks import judge


def test_neighbours_are_compared_by_the_fastest_after_and_the_slowest_before():
    quiet = profile({("rotary", "qk", "decode"): (10.0, None), ("attention_decode", "a", "decode"): (80.0, None),
                     ("attention_decode", "b", "decode"): (20.0, None)}, 200.0)  # fmt: skip
    busy = profile(
        {("rotary", "qk", "decode"): (15.0, None), ("attention_decode", "a", "decode"): (120.0, None)}, 200.0
    )
    assert _by_operator([quiet], min) == {"rotary": 10.0, "attention_decode": 100.0}
    assert _by_operator([quiet, busy], max) == {"rotary": 15.0, "attention_decode": 120.0}
    assert _by_operator([quiet, busy], min) == {"rotary": 10.0, "attention_decode": 100.0}


class Course:
    """A course whose tests are answered by a table, and whose stages are remembered."""

    def __init__(self, answers, left_s=1e6, finished=()):
        self.answers, self.asked, self.stages = answers, [], set(finished)
        run = SimpleNamespace(
            clock=SimpleNamespace(left_s=lambda: left_s), finished=lambda stage, key: stage in self.stages or None,
            key=lambda *parts: "key",
        )  # fmt: skip
        self.lab, self.costs, self.stack = (
            SimpleNamespace(run=run),
            Costs(60.0, 20.0),
            Stack(Settings(engine="transformers")),
        )


def winners(*names):
    found = []
    for size, name in enumerate(names, 1):
        problem = problem_of("linear", n=16 * size, k=16, visible=[{"m": 1}], seed=0)
        family = families("linear")[0]
        promoted = Promoted(problem, family.render(family.default, problem), "v", ({"m": 1},))
        found.append(SimpleNamespace(task=SimpleNamespace(campaign_id=name), promoted=promoted))
    return found


@pytest.fixture
def promote(monkeypatch):
    def evaluate(course, number, group, before, opportunities):
        names = "+".join(winner.task.campaign_id for winner in group)
        course.asked.append(names)
        return course.answers.get(names, False)

    monkeypatch.setattr(rounds, "_evaluate", evaluate)

    def run(course, *names):
        rounds._promote(course, 1, winners(*names), None, ())
        return course.asked

    return run


def test_all_winners_together_and_one_by_one_only_where_that_failed(promote):
    assert promote(Course({})) == []
    assert promote(Course({"a+b": True}), "a", "b") == ["a+b"]
    assert promote(Course({"a": True}), "a", "b") == ["a+b", "a", "b"]
    assert promote(Course({}), "a") == ["a"]
    assert promote(Course({}, left_s=139.0), "a", "b") == ["a+b"]  # 2 · 60 + 20 s are needed for one more


def test_what_was_tested_before_a_kill_counts_whatever_time_is_left(promote):
    kept = Course({"b": True}, left_s=1.0, finished={"140-evaluate-b"})
    assert promote(kept, "a", "b") == ["a+b", "b"]


def test_groups_of_a_round_have_files_of_their_own():
    course, all_of = Course({}), winners("a", "b")
    tests = [rounds._test(course, 1, group) for group in (all_of, all_of[:1], all_of[1:])]
    assert len({test.name for test in tests}) == len({test.stage for test in tests}) == 3
    assert [len(test.fresh.kernels) for test in tests] == [2, 1, 1]


@pytest.mark.parametrize(("threads", "held"), [(os.cpu_count() or 1, True), ((os.cpu_count() or 1) - 1, False)])
def test_a_compiler_waits_for_the_device_where_no_core_is_spare(tmp_path, monkeypatch, threads, held):
    seen = []

    def build(candidate, problem, builds):
        with (tmp_path / "cpu.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen.append(False)
            except BlockingIOError:
                seen.append(True)
        raise BuildFailed("no")

    monkeypatch.setattr(judge, "build", build)
    monkeypatch.setattr("kernels.ruler.judge.judge", lambda *args, **options: "judged")
    bench = judge.Bench(tmp_path, tmp_path, "cpu", threads, lambda problem: None)
    one = winners("a")[0].promoted
    assert bench.judge(one.problem, one.candidate, "screen") == "judged"
    assert seen == [held]
