"""The offline planner and the planning round: from a profile to campaigns, through wins and losses, to a stop."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from test_kb import PROVENANCE, outcome

from kb import clock, crashes, ideas
from kb import records as r
from kb.store import Store
from kernels.ruler.spec import Cost, Problem, Tensor
from profiles.engines.base import KnobSpec
from tasks import plan, record
from tasks.agents.planner import ASSUMED_HEADROOM, OfflinePlanner
from tasks.agents.protocol import Left, Opportunity, PlanContext, Proposal, SettingsResult


def linear(n: int, k: int, share: float, headroom: float | None = 3.0, **more: object) -> Opportunity:
    name = f"linear_n{n}_k{k}"
    problem = Problem(
        name=name, operator=str(more.pop("operator", "linear")), axes={"m": None, "n": n, "k": k},
        inputs=(Tensor("x", ("m", "k"), "bfloat16"), Tensor("w", ("n", "k"), "bfloat16", constant=True)),
        outputs=(Tensor("y", ("m", "n"), "bfloat16"),), reference="def run(x, w):\n    return x @ w.T\n",
        cost=Cost("2*m*n*k", "2*(m*k+n*k)", "2*m*n", "bfloat16"), visible=({"m": 8},),
    )  # fmt: skip
    given = {"families": ("linear_bf16", "linear_split"), "sites": (name,), **more}
    return Opportunity(problem=problem, shape={"m": 8}, time_share=share, headroom=headroom, **given)


OPPORTUNITIES = (
    linear(576, 576, 0.10), linear(1536, 576, 0.25), linear(576, 1536, 0.15), linear(49152, 576, 0.2),
    linear(1600, 600, 0.45, operator="mlp", families=("mlp",), covers=("linear", "silu_mul"),
           sites=("linear_n1536_k576", "linear_n576_k1536")),
    linear(7, 7, 0.05, operator="softmax", families=()),
)  # fmt: skip


def settings() -> SettingsResult:
    trials = [
        r.Trial(run_id="run", number=n, knobs={"threads": t}, status="complete", metric="output_tokens_per_s", value=v,
                provenance=PROVENANCE, at="2026-01-01T00:00:00+00:00")
        for n, (t, v) in enumerate([(1, 100.0), (2, 104.0), (1, 101.0)])
    ]  # fmt: skip
    knobs = (
        KnobSpec(name="threads", choices=(1, 2), default=1, help="Threads.", interacts_with=("linear",)),
        KnobSpec(name="cache", choices=("a", "b"), default="a", help="Cache."),
    )
    return SettingsResult("output_tokens_per_s", 100.0, 104.0, {"threads": 2}, tuple(trials), knobs)


def context(store: Store, round_number: int = 1, **changes: object) -> PlanContext:
    given = {
        "run_id": "run", "round_number": round_number, "target": "t", "target_family": "cpu", "engine": "e",
        "dtype": "bfloat16", "opportunities": OPPORTUNITIES,
        "settings": settings(), "left": Left(wall_s=600.0, campaigns=6),
        "campaign_s": 60.0,
    }  # fmt: skip
    return plan.context_of(store, **{**given, **changes})


def levers(chosen: tuple[r.Idea, ...]) -> list[tuple[str, str | None]]:
    return [(i.lever, i.problem_name) for i in chosen]


def test_one_idea_per_family_and_shape_class_with_its_derivation(tmp_path: Path) -> None:
    proposals = OfflinePlanner().plan(context(Store(tmp_path)))
    kernels = [p for p in proposals if p.layer == "kernel"]
    assert {p.problem_name for p in kernels} == {"linear_n1536_k576", "linear_n49152_k576", "linear_n1600_k600"}
    best = next(p for p in kernels if p.problem_name == "linear_n1536_k576")
    assert "25.0% of the time at 3.00× its roofline" in best.derivation
    assert "16.7% of the time can go away" in best.derivation
    assert "2 more shapes" in best.derivation
    unknown = context(Store(tmp_path), opportunities=(linear(576, 576, 0.3, None),))
    [one] = [p for p in OfflinePlanner().plan(unknown) if p.layer == "kernel"]
    assert f"{ASSUMED_HEADROOM}" in one.derivation
    knobs = {p.lever: p for p in proposals if p.layer == "settings"}
    assert knobs["knobs: threads"].headroom == pytest.approx(1 + 104 / 101 - 1)
    assert knobs["knobs: threads"].settled
    assert knobs["knobs: cache"].settled is None


def test_a_pruned_trial_is_a_value_that_was_tried(tmp_path: Path) -> None:
    found = settings()
    pruned = found.trials[0].model_copy(
        update={"number": 3, "knobs": {"cache": "b"}, "status": "pruned", "value": 60.0}
    )
    given = context(Store(tmp_path), settings=replace(found, trials=(*found.trials, pruned)))
    [cache] = [p for p in OfflinePlanner().plan(given) if p.lever == "knobs: cache"]
    assert cache.settled is not None


def test_a_round_picks_the_best_that_do_not_overlap(tmp_path: Path) -> None:
    store = Store(tmp_path)
    done = plan.plan_round(store, OfflinePlanner(), context(store), count=2)
    assert done.stop is None
    assert levers(done.ideas) == [
        ("mlp × template:mlp", "linear_n1600_k600"),
        ("linear × template:linear_bf16", "linear_n49152_k576"),
    ]
    assert any("same place" in why for why in done.passed_over.values())
    tree = ideas.load(store, "run", lambda: "")
    assert {n.idea.scope_id for n in tree.nodes.values()} == {done.scope_id}
    assert "linear_n1536_k576: 25.0%" in store.query("SELECT text FROM scopes")[0]["text"]
    again = plan.plan_round(store, OfflinePlanner(), context(store), count=2)
    assert again.added == ()
    assert levers(again.ideas) == levers(done.ideas)


def test_equal_measurements_give_equal_plans(tmp_path: Path) -> None:
    plans = []
    for name, order in (("a", OPPORTUNITIES), ("b", OPPORTUNITIES[::-1])):
        store = Store(tmp_path / name)
        done = plan.plan_round(store, OfflinePlanner(), context(store, opportunities=order), count=3)
        plans.append(([i.id for i in done.ideas], sorted(done.added)))
    assert plans[0] == plans[1]


def win(store: Store, idea: r.Idea, **changes: object) -> record.Recorded:
    told = {"campaign_id": f"c-{idea.id}", "idea_id": idea.id, "operator": idea.operator, "lever": idea.lever,
            "problem_name": idea.problem_name, "axes": idea.axes, "at": clock.now()}  # fmt: skip
    return record.record_outcome(store, outcome(0, **{**told, **changes}), opportunities=OPPORTUNITIES)


def promote(store: Store, idea: r.Idea, decision: str = "promoted") -> record.Recorded:
    result = r.EndToEnd(
        id=f"e-{idea.id}", run_id="run", purpose="promotion", idea_id=idea.id, stack_id="s", metric="m", ratio=1.2,
        decision=decision, reason="measured", provenance=PROVENANCE, at="2026-01-01T00:00:01+00:00",
    )  # fmt: skip
    return record.record_end_to_end(store, result, opportunities=OPPORTUNITIES)


def test_success_brings_siblings_that_start_warm_and_reopens_settings(tmp_path: Path) -> None:
    store = Store(tmp_path)
    plan.plan_round(store, OfflinePlanner(), context(store), count=2)
    tree = ideas.load(store, "run", lambda: "")
    first = next(n.idea for n in tree.nodes.values() if n.idea.problem_name == "linear_n1536_k576")
    mlp = next(n for n in tree.nodes.values() if n.idea.operator == "mlp")
    recorded = win(store, first, parameters={"block": 48})
    assert recorded.rescored >= 3
    assert promote(store, first).reopened == (
        next(n.idea.id for n in tree.nodes.values() if n.idea.lever == "knobs: threads"),
    )
    after = ideas.load(store, "run", lambda: "")
    assert after.nodes[mlp.idea.id].score > mlp.score  # its target family did well
    win(store, first)  # recorded again after a kill
    assert store.query("SELECT count(*) AS n FROM outcomes") == [{"n": 1}]
    ctx = context(store, 2)
    done = plan.plan_round(store, OfflinePlanner(), ctx, count=6)
    grown = [i for i in ideas.load(store, "run", lambda: "").nodes.values() if i.idea.parent_id == first.id]
    assert {(n.idea.lever, n.idea.problem_name) for n in grown} == {
        ("linear × template:linear_bf16", "linear_n576_k576"), ("linear × template:linear_bf16", "linear_n576_k1536"),
        ("linear × template:linear_split", "linear_n1536_k576"),
    }  # fmt: skip
    sibling = next(i for i in done.ideas if i.problem_name == "linear_n576_k576")
    task = plan.task_for(store, ctx, sibling, campaign_id="cx", budget_s=9, threads=2, builds=tmp_path)
    assert task.warm_starts[0].parameters == {"block": 48}
    assert "Try first" in task.scope
    assert task.families == ("linear_bf16",)
    store.ingest()
    assert store.query("SELECT text FROM scopes WHERE id = ?", [task.scope_id])[0]["text"] == task.scope


def test_failure_lowers_the_branch_and_brings_the_next_template(tmp_path: Path) -> None:
    store = Store(tmp_path)
    done = plan.plan_round(store, OfflinePlanner(), context(store), count=2)
    lost = done.ideas[1]
    win(store, lost, conclusion="did_not_win", reason="slower")
    nexts = plan.plan_round(store, OfflinePlanner(), context(store, 2), count=6)
    tree = ideas.load(store, "run", lambda: "")
    assert tree.nodes[lost.id].idea.status == "failed"
    child = next(n.idea for n in tree.nodes.values() if n.idea.parent_id == lost.id)
    assert child.lever == "linear × template:linear_split"
    assert lost.id not in {i.id for i in nexts.ideas}


def test_what_the_profile_no_longer_shows_is_not_worked_on(tmp_path: Path) -> None:
    store = Store(tmp_path)
    plan.plan_round(store, OfflinePlanner(), context(store), count=1)
    left = tuple(o for o in OPPORTUNITIES if o.problem.operator != "mlp")
    done = plan.plan_round(store, OfflinePlanner(), context(store, 2, opportunities=left), count=6)
    assert "mlp" not in {i.operator for i in done.ideas}


def test_it_stops_and_says_why(tmp_path: Path) -> None:
    numbers = itertools.count()

    def stop(**changes: object) -> str | None:
        store = Store(tmp_path / str(next(numbers)))
        return plan.plan_round(store, OfflinePlanner(), context(store, **changes), count=2).stop

    assert stop() is None
    assert "no campaigns are left" in str(stop(left=Left(wall_s=600, campaigns=0)))
    assert "20 s are left" in str(stop(left=Left(wall_s=20, campaigns=3)))
    closed = tuple(dataclasses.replace(o, headroom=1.01) for o in OPPORTUNITIES)
    assert "gap closed" in str(stop(opportunities=closed))
    small = (linear(576, 576, 0.01, 1.2), linear(9, 9, 0.9, 5.0, families=()))
    assert "no idea is worth its cost" in str(stop(opportunities=small))
    assert "no open idea" in str(stop(opportunities=(linear(9, 9, 0.9, 5.0, families=()),)))


def test_crash_sets_and_finished_attempts_reach_the_executor(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record.record_crash(
        store, scope={"operator": "mlp"}, combination={"block": 64}, failure="crash", detail="signal 11",
        versions={"engine": "e"}, because="x", at="2099-01-01T00:00:00+00:00",
    )  # fmt: skip
    ctx = context(store)
    done = plan.plan_round(store, OfflinePlanner(), ctx, count=1)
    old = r.Attempt(campaign_id="c", number=1, candidate_id="k", verdict_id="v", status="valid")
    task = plan.task_for(
        store, ctx, done.ideas[0], campaign_id="c", budget_s=9, threads=1, builds=tmp_path, finished=[old]
    )
    assert crashes.excluded({"block": 64, "x": 1}, task.crash_sets) is not None
    assert "Never: {'block': 64}" in task.scope
    assert task.finished == (old,)


def test_what_a_planner_claims_is_kept_apart_and_unknown_problems_are_not_taken(tmp_path: Path) -> None:
    class Boaster:
        def plan(self, context: PlanContext) -> list[Proposal]:
            base = Proposal("h", "kernel", "linear × free", "linear", "free", "d", problem_name="linear_n576_k576",
                            time_share=1.0, headroom=99.0, claims={"speedup": 50})  # fmt: skip
            return [base, base, dataclasses.replace(base, problem_name="nowhere")]

    store = Store(tmp_path)
    done = plan.plan_round(store, Boaster(), context(store), count=3)
    assert len(done.added) == 1
    assert (done.ideas[0].time_share, done.ideas[0].headroom) == (0.10, 3.0)
    assert store.query("SELECT claims FROM claims")[0]["claims"] == '{"speedup":50}'
