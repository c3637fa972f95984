"""The settings search on a made-up engine: order, failures, gates, duplicates, resume after SIGKILL, the defaults."""

import itertools
import json
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from kb.records import CrashSet, Provenance, Trial
from kernels.identity import content_hash
from profiles.engines.base import EngineFailure, KnobSpec, Settings
from profiles.load import load_workload
from tasks.propose import Space, propose, shrink, violation
from tasks.search import Confirmation, Gate, Measured, search

ROOT = Path(__file__).parents[1]
PROVENANCE = Provenance(roofloop="0", ruler="0", engine="fake 1", target="t", workload="w")
KNOBS = (
    KnobSpec(name="threads", choices=(1, 2), default=2, help=""),
    KnobSpec(name="batch", choices=(1, 4, 8), default=8, help=""),
    KnobSpec(name="compile", choices=(False, True), default=False, help=""),
    KnobSpec(name="spec", choices=(0, 2), default=0, help=""),
)
MANY = (*KNOBS, *(KnobSpec(name=f"k{i}", choices=(0, 1, 2, 3), default=0, help="") for i in range(3)))


def speed(full):
    value = 100.0 * (1.2 if full["threads"] == 1 else 1.0) * (1.1 if full["compile"] else 1.0)
    return value * (full["batch"] / 8) ** 0.3 * (1 + 0.05 * sum(full.get(f"k{i}", 0) for i in range(3)))


class Bench:
    """A deterministic engine with calls recorded."""

    def __init__(self, knobs=KNOBS, rule=None, gates=None):
        self.knobs, self.rule, self.gates = knobs, rule or (lambda full: None), gates or (lambda full: {})
        self.calls, self.trials = [], []

    def measure(self, settings, best=None):
        self.best = best
        full = {k.name: k.default for k in self.knobs} | settings.knobs
        self.calls.append(full)
        self.rule(full)
        return Measured(content_hash(full)[:16], full, speed(full), self.gates(full))

    def run(
        self, *, trials=20, finished=(), seed=1, deadline=1e9, clock=lambda: 0.0, knobs_fixed=None, limits=None, **more
    ):
        base = load_workload("tiny-cpu")
        workload = base.model_copy(
            update={
                "budget": base.budget.model_copy(update={"settings_trials": trials}),
                "engine": base.engine.model_copy(update={"knobs": knobs_fixed or {}, "search": limits or {}}),
            }
        )
        return search(
            workload,
            self.knobs,
            self.measure,
            finished,
            self.trials.append,
            run_id="r",
            provenance=PROVENANCE,
            seed=seed,
            deadline=deadline,
            clock=clock,
            **more,
        )


def asked(result, role=None):
    return [t.knobs for t in result.trials if role is None or t.role == role]


def test_defaults_come_first_and_last_and_the_best_wins():
    bench = Bench()
    result = bench.run(trials=24)
    assert (bench.trials[0].role, bench.trials[0].knobs) == ("default", {})
    assert (bench.trials[-1].role, bench.trials[-1].knobs) == ("default_again", {})
    assert result.best.knobs == {"threads": 1, "compile": True}
    assert result.default_first == result.default_last == 100.0
    assert result.drift == 0
    assert [e.knob for e in result.effects][:2] == ["threads", "compile"]
    assert result.effects[0].ratio == pytest.approx(1.2)
    assert result.stopped == "every valid combination was tried" or len(asked(result, "search")) == 23


def test_a_pruned_trial_is_known_but_cannot_win():
    """The best so far is told for each trial of the search, never for the defaults; what is pruned stays a figure."""
    told = []

    class Pruning(Bench):
        def measure(self, settings, best=None):
            got = super().measure(settings, best)
            told.append((dict(settings.knobs), best))
            return replace(got, pruned=best is not None and got.value / best < 0.99)

    bench = Pruning()
    result = bench.run(trials=24)
    assert [best for knobs, best in told if not knobs] == [None, None]
    assert next(best for knobs, best in told if knobs) == 100.0
    pruned = [t for t in result.trials if t.status == "pruned"]
    assert pruned
    assert all(t.value is not None and "first round" in t.reason for t in pruned)
    assert result.best.knobs == {"threads": 1, "compile": True}
    assert max(t.value for t in pruned) < max(t.value for t in result.trials)


def test_one_factor_at_a_time_then_the_combination():
    result = Bench().run(trials=8)
    first = asked(result, "search")
    assert all(len(knobs) == 1 for knobs in first[:4])
    assert {next(iter(knobs)) for knobs in first[:4]} == {"threads", "batch", "compile", "spec"}
    assert {"threads": 1, "compile": True} in first


def test_no_point_twice_in_any_regime():
    for knobs in (KNOBS, MANY):
        result = Bench(knobs).run(trials=30)
        points = [json.dumps(k, sort_keys=True) for t in result.trials if t.role != "default_again" for k in [t.knobs]]
        assert len(points) == len(set(points))
    assert len(result.trials) == 31
    assert result.best_trial is not None
    best = next(t for t in result.trials if t.number == result.best_trial)
    assert best.value > 1.35 * result.default_first  # TPE goes on beyond the combination of two


def test_small_budget_still_tries_a_combination():
    assert any(len(knobs) > 1 for knobs in asked(Bench().run(trials=6), "search"))


def test_same_seed_same_trials_and_another_seed_differs():
    runs = [asked(Bench(MANY).run(trials=25, seed=s)) for s in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_a_cut_search_goes_on_as_if_nothing_had_happened():
    whole = Bench(MANY).run(trials=20)
    for cut in (1, 5, 14, 20, 21):
        bench = Bench(MANY)
        rest = bench.run(trials=20, finished=whole.trials[:cut])
        assert asked(rest) == asked(whole)
        assert len(bench.calls) == len(whole.trials) - cut
        assert rest.best == whole.best


def test_failures_are_typed_and_their_combination_is_not_tried_again():
    def rule(full):
        if full["compile"] and full["batch"] == 4:
            raise EngineFailure("hang", "no token for 30 s")
        if full["threads"] == 1:
            raise EngineFailure("out_of_memory", "killed")

    bench = Bench(rule=rule)
    result = bench.run(trials=24)
    failed = {t.status for t in result.trials}
    assert {"hang", "out_of_memory", "complete"} <= failed
    assert sum(full["threads"] == 1 for full in bench.calls) == 1
    assert sum(full["compile"] and full["batch"] == 4 for full in bench.calls) == 1
    assert all(t.value is None for t in result.trials if t.status in ("hang", "out_of_memory"))
    assert result.best.knobs == {"compile": True}
    learnt = {c.failure: c.combination for c in result.crash_sets}
    assert learnt == {"hang": {"compile": True, "batch": 4}, "out_of_memory": {"threads": 1}}


def test_known_crash_sets_are_left_out_with_the_reason():
    known = CrashSet(id="x", scope={}, combination={"threads": 1}, failure="crash", detail="SIGSEGV", versions={})
    bench = Bench()
    result = bench.run(trials=24, crash_sets=[known])
    assert all(full["threads"] != 1 for full in bench.calls)
    assert result.excluded[0] == ({"threads": 1}, "known to fail: crash (SIGSEGV)")


def test_gates_are_constraints_and_unknown_is_not_a_pass():
    def gates(full):
        if full["compile"]:
            return {"ttft": Gate(None, 10.0, None, "no first token seen")}
        return {"ttft": Gate(20.0 if full["threads"] == 1 else 5.0, 10.0, full["threads"] != 1)}

    result = Bench(gates=gates).run(trials=24)
    assert result.best == Settings(engine="transformers")
    assert result.reason == "no settings were better than the defaults"
    statuses = {json.dumps(t.knobs): t.status for t in result.trials}
    assert statuses['{"threads": 1}'] == statuses['{"compile": true}'] == "gate_failed"
    assert violation({"a": {"ok": None}}) == 1.0
    assert violation({"a": {"ok": False, "value": 15.0, "limit": 10.0}}) == pytest.approx(0.5)


def test_what_resolves_to_the_same_is_a_replicate():
    class Deaf(Bench):
        def measure(self, settings, best=None):
            got = super().measure(settings, best)
            hidden = {k: v for k, v in got.resolved.items() if k != "spec"}
            return Measured(content_hash(hidden)[:16], hidden, got.value, {})

    result = Deaf().run(trials=24)
    duplicates = [t for t in result.trials if t.status == "duplicate"]
    assert duplicates
    assert all("same settings as trial" in t.reason for t in duplicates)
    assert "spec" not in result.best.knobs


@pytest.mark.parametrize("better", [True, False])
def test_the_winner_must_be_confirmed_against_the_defaults(better):
    pairs = []

    def confirm(a, b):
        pairs.append((a.knobs, b.knobs))
        return Confirmation(better, 1.3 if better else 0.99, 0.9, 1.4, "interval holds 1")

    result = Bench().run(trials=24, confirm=confirm)
    assert pairs[0] == ({"threads": 1, "compile": True}, {})
    assert (result.best.knobs == {}) == (not better)
    assert len(pairs) == (1 if better else 2)
    assert "confirmed" in result.reason


def test_it_stops_in_time_with_room_for_the_defaults_and_the_confirmation():
    now = [0.0]

    class Slow(Bench):
        def measure(self, settings, best=None):
            now[0] += 10.0
            return super().measure(settings, best)

    confirm = lambda a, b: Confirmation(True, 1.2, 1.1, 1.3)  # noqa: E731
    result = Slow().run(trials=24, deadline=150.0, clock=lambda: now[0], confirm=confirm)
    assert result.trials[-1].role == "default_again"
    assert result.stopped == "no time for another trial"
    assert result.confirmations
    assert now[0] <= 110
    assert len(result.trials) >= 6


def test_the_objective_may_be_a_time():
    base = load_workload("smollm2-cpu-latency")

    def measure(settings, best):
        full = {k.name: k.default for k in KNOBS} | settings.knobs
        return Measured(content_hash(full)[:16], full, 1000 / speed(full), {})

    result = search(
        base,
        KNOBS,
        measure,
        (),
        lambda t: None,
        run_id="r",
        provenance=PROVENANCE,
        seed=0,
        deadline=1e9,
        clock=lambda: 0.0,
    )
    assert result.best.knobs == {"threads": 1, "compile": True}
    assert result.effects[0].ratio > 1


def test_held_and_limited_knobs():
    bench = Bench()
    result = bench.run(trials=30, knobs_fixed={"spec": 2}, limits={"batch": (4, 8), "compile": ()})
    assert bench.calls[0]["spec"] == 0  # stock is measured without them
    assert all(full["spec"] == 2 for full in bench.calls[1:-1])
    assert {full["batch"] for full in bench.calls} == {4, 8}
    assert not any(full["compile"] for full in bench.calls)
    assert len(asked(result, "search")) == 4


def test_shrink_names_the_smallest_combination():
    defaults = {"a": 0, "b": 0, "c": 0}
    assert shrink({"a": 1, "b": 1, "c": 0}, [{"a": 1, "b": 0, "c": 0}], defaults) == {"b": 1}
    assert shrink({"a": 1, "b": 1, "c": 0}, [], defaults) == {"a": 1, "b": 1}  # either may be to blame
    good = [{"a": 1, "b": 0, "c": 0}, {"a": 0, "b": 1, "c": 0}]
    assert shrink({"a": 1, "b": 1, "c": 0}, good, defaults) == {"a": 1, "b": 1}


def test_a_failing_default_leaves_the_field_to_what_runs():
    def rule(full):
        if full["batch"] == 8:
            raise EngineFailure("out_of_memory", "pool of 6 GB")

    result = Bench(rule=rule).run(trials=24)
    assert result.trials[0].status == "out_of_memory"
    assert result.best.knobs["batch"] == 4
    assert "did not pass" in result.reason


SCRIPT = """
    import json, os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from kb.records import Trial
    from test_search import MANY, Bench
    folder, die_at = Path(sys.argv[1]), int(sys.argv[2])
    finished = [Trial.model_validate_json(p.read_text()) for p in sorted(folder.glob("*.json"))]
    bench = Bench(MANY)
    def write(trial):
        part = folder / "part"
        part.write_text(trial.model_dump_json())
        part.rename(folder / f"{{trial.number:03}}.json")
        with (folder / "measured").open("a") as log:
            log.write(json.dumps(trial.knobs, sort_keys=True) + "\\n")
        if len(bench.calls) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    bench.trials = type("", (), {{"append": staticmethod(write)}})
    result = bench.run(trials=14, finished=finished)
    print(json.dumps(result.best.knobs, sort_keys=True))
"""


def test_sigkill_and_again(tmp_path):
    script = textwrap.dedent(SCRIPT).format(tests=str(ROOT / "tests"))

    def go(folder, die_at):
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", script, str(folder), str(die_at)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    whole = go(tmp_path / "whole", 0)
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed"
    assert go(killed, 6).returncode == -signal.SIGKILL
    assert len(list(killed.glob("*.json"))) == 6
    again = go(killed, 0)
    assert again.stdout == whole.stdout
    log = (killed / "measured").read_text().splitlines()
    assert log == (tmp_path / "whole" / "measured").read_text().splitlines()
    assert len(set(log)) == len(log) - 1  # only the defaults come twice
    assert all(Trial.model_validate_json(p.read_text()) for p in killed.glob("*.json"))


def test_proposals_cover_a_small_space_entirely():
    workload = load_workload("tiny-cpu")
    space = Space.of(workload, KNOBS)
    trials, points = [], set()
    for number in itertools.count():
        point = propose(space, trials, seed=0, metric="output_tokens_per_s")
        if point is None:
            break
        points.add(point)
        full = space.full(space.knobs(point))
        trials.append(
            Trial(
                run_id="r",
                number=number,
                knobs=space.knobs(point),
                status="complete",
                metric="output_tokens_per_s",
                value=speed(full),
                provenance=PROVENANCE,
                at="",
            )
        )
    assert len(points) == space.size == 24
