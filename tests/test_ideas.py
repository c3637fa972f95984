"""The tree of ideas: scores, and what each outcome does to every open idea."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from test_kb import AT, PROVENANCE, outcome

from kb import figures, ideas, queries, score
from kb import records as r
from kb.store import Store


def clock_from(start: int = 0):
    ticks = itertools.count(start)
    return lambda: f"2026-01-01T00:00:00.{next(ticks):06d}+00:00"


def idea(ident: str, **changes: object) -> r.Idea:
    base = {
        "id": ident, "run_id": "run", "hypothesis": "h", "layer": "kernel", "lever": "linear × template:a",
        "operator": "linear", "problem_name": f"p-{ident}", "approach": "template:a", "time_share": 0.4,
        "headroom": 2.0,
        "derivation": "d", "sites": [ident], "cost_minutes": 1.0,
    }  # fmt: skip
    return r.Idea.model_validate({**base, **changes})


def tree_of(store: Store, *them: r.Idea) -> ideas.Tree:
    tree = ideas.Tree(store, "run", {}, clock_from())
    for one in them:
        assert tree.add(one)
    store.ingest()
    return tree


def rescore(tree: ideas.Tree, cause: str = "start", **more: object) -> r.Rescore | None:
    tree.store.ingest()
    return tree.rescore(score.odds(tree.store), target_family="cpu", cause=cause, why=cause, **more)


def test_the_score_is_the_product_that_is_written_down() -> None:
    known = score.Odds({("cpu",): (3, 1), ("cpu", "linear"): (3, 1), ("cpu", "linear", "linear × template:a"): (2, 0)})
    one = idea("a", accuracy_risk=0.25, crash_risk=0.1, cost_minutes=2.0)
    [parts] = score.score([one], known, target_family="cpu", at=AT, why="")
    family = (4 * 0.4 + 3) / 8
    operator = (4 * family + 3) / 8
    lever = (4 * operator + 2) / 6
    assert parts.p_success == pytest.approx(lever * 0.9)
    assert parts.gain == pytest.approx(0.4 * (1 - 1 / 2.0))
    assert parts.urgency == pytest.approx(1.5)
    assert parts.score == pytest.approx(lever * 0.9 * 0.2 * 1.5 * 0.75 / 2)
    a, b = known.posterior("cpu", "linear", "linear × template:a")
    assert (a, b) == pytest.approx((4 * operator + 2, 4 * (1 - operator)))


def test_gain_is_capped_by_physics_and_by_what_was_shown() -> None:
    share, headroom = np.array([0.5, 0.5, 0.5]), np.array([2.0, 2.0, 0.5])
    gain = score.bounded_gain(share, headroom, np.array([10.0, 1.25, 3.0]))
    assert gain == pytest.approx([0.25, 0.1, 0.0])
    assert score.urgency(np.array([2.0]), 3.0) == pytest.approx([3.0])
    assert score.urgency(np.array([1e9]), 0.5) == pytest.approx([2.0])


def test_an_untried_lever_is_judged_by_its_relatives() -> None:
    good = score.Odds({("cpu",): (8, 0), ("cpu", "linear"): (8, 0)})
    assert good.chance("cpu", "linear", "new") > good.chance("cpu", "rmsnorm", "new") > score.PRIOR_SUCCESS
    assert good.chance("cuda", "linear", "new") == pytest.approx(score.PRIOR_SUCCESS)


def test_every_outcome_rescores_every_open_idea_and_the_history_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tree = tree_of(store, idea("a"), idea("b"), idea("c", lever="rmsnorm × template:x", operator="rmsnorm"))
    rescore(tree)
    before = {n.idea.id: n.score for n in tree.nodes.values()}
    tree.move("a", "running", "campaign")
    lost = outcome(1, idea_id="a", conclusion="did_not_win", reason="slower")
    store.write(lost)
    ideas.conclude(tree, lost)
    done = rescore(tree, "c1")
    assert done is not None
    assert set(done.scores) == {"b", "c"}
    after = {n.idea.id: n.score for n in tree.nodes.values()}
    assert after["b"] < before["b"]
    assert before["c"] > after["c"] > after["b"]  # a relative of another operator loses less
    store.ingest()
    again = ideas.load(store, "run", clock_from(900))
    assert again.nodes == tree.nodes
    assert [s.why for s in again.nodes["b"].idea.scores] == ["start", "c1"]
    assert rescore(again, "nothing happened") is None
    store.rebuild()
    assert ideas.load(store, "run", clock_from()).nodes == tree.nodes


def test_claims_do_not_move_scores(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tree = tree_of(store, idea("a"))
    rescore(tree)
    store.write(r.Claim(run_id="run", subject="a", claims={"speedup": 100.0}, at=AT))
    store.write(outcome(7, idea_id="zz", conclusion="failed", claims={"speedup": 100.0}))
    assert rescore(tree, "claims") is None


def test_only_results_of_the_same_ruler_count_when_asked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(outcome(1))
    store.ingest()
    assert score.odds(store, ruler="r1").counts[("cpu",)] == (1.0, 0.0)
    assert score.odds(store, ruler="r2").counts == {}


def test_a_win_that_does_not_hold_end_to_end_counts_as_a_failure(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(outcome(1, idea_id="a"))
    store.write(end("e", "a", "rejected"))
    store.ingest()
    assert score.odds(store).counts[("cpu",)] == (0.0, 1.0)


def end(ident: str, of: str, decision: str) -> r.EndToEnd:
    return r.EndToEnd(
        id=ident, run_id="run", purpose="promotion", idea_id=of, stack_id="s", metric="output_tokens_per_s", ratio=1.1,
        decision=decision, reason="because", provenance=PROVENANCE, at=AT,
    )  # fmt: skip


def test_promotion_supersedes_what_it_overlaps_and_reopens_settings(tmp_path: Path) -> None:
    tree = tree_of(
        Store(tmp_path), idea("gate", sites=["l0.gate"]), idea("mlp", operator="mlp", sites=["l0.gate", "l0.down"]),
        idea("knob", layer="settings", lever="knobs: threads", operator="settings", interacts_with=["mlp"], sites=[]),
        idea("other", layer="settings", lever="knobs: x", operator="settings", interacts_with=["attention"], sites=[]),
    )  # fmt: skip
    for name in ("knob", "other"):
        tree.move(name, "expired", "all values tried")
    for name in ("gate", "mlp"):
        tree.move(name, "running", "")
        tree.move(name, "succeeded", "")
    assert ideas.decide(tree, end("e1", "gate", "promoted")) == []
    assert ideas.decide(tree, end("e2", "mlp", "promoted")) == ["knob"]
    status = {k: n.idea.status for k, n in tree.nodes.items()}
    assert status == {"gate": "deepened", "mlp": "promoted", "knob": "open", "other": "expired"}
    assert ideas.decide(tree, end("e2", "mlp", "promoted")) == []


def test_a_branch_that_only_fails_is_abandoned_with_the_reason(tmp_path: Path) -> None:
    children = [idea(f"x{n}", parent_id="top") for n in range(4)]
    tree = tree_of(Store(tmp_path), idea("top"), *children, idea("elsewhere"))
    for n in range(3):
        tree.move(f"x{n}", "running", "")
        ideas.conclude(tree, outcome(n, idea_id=f"x{n}", conclusion="did_not_win"))
    assert tree.nodes["x3"].idea.status == "abandoned"
    assert "3 ideas of this branch failed" in tree.nodes["x3"].idea.reason
    assert [n.idea.id for n in tree.open()] == ["elsewhere", "top"]


def test_failed_tools_put_an_idea_back_and_give_up_in_the_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tree = tree_of(store, idea("a"))
    for n in range(ideas.GIVE_UP_AFTER):
        assert tree.nodes["a"].idea.status == "open"
        tree.move("a", "running", "")
        broken = outcome(1, idea_id="a", conclusion="failed", reason=f"no compiler {n}")
        store.write(broken)
        store.ingest()
        ideas.conclude(tree, broken)
        store.ingest()
        ideas.conclude(tree, broken)  # dealt with before: nothing happens
    assert tree.nodes["a"].idea.status == "abandoned"


def test_impossible_moves_and_races_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tree = tree_of(store, idea("a"))
    with pytest.raises(ValueError, match="cannot follow"):
        tree.move("a", "promoted", "")
    other = ideas.load(store, "run", clock_from(500))
    tree.move("a", "running", "mine")
    with pytest.raises(ValueError, match="another process"):
        other.move("a", "abandoned", "theirs")
    store.ingest()
    assert ideas.load(store, "run", clock_from()).nodes["a"].idea.reason == "mine"


def test_pick_takes_the_best_that_do_not_overlap_and_says_why_not_the_rest(tmp_path: Path) -> None:
    tree = tree_of(
        Store(tmp_path), idea("mlp", time_share=0.6, sites=["gate", "down"]),
        idea("gate", time_share=0.5, sites=["gate"]),
        idea("head", time_share=0.1), idea("crash", time_share=0.9, crash_risk=0.8), idea("nil", headroom=1.0),
        idea("gates", time_share=1.0, accuracy_risk=1.0),
    )  # fmt: skip
    rescore(tree)
    picked, passed = ideas.pick(tree, 3)
    assert [n.idea.id for n in picked] == ["mlp", "head"]
    assert "same place" in passed["gate"]
    assert "crash risk" in passed["crash"]
    assert "accuracy gate" in passed["gates"]
    tree.store.ingest()
    loaded = ideas.load(tree.store, "run", clock_from())
    assert loaded.nodes["crash"].excluded == tree.nodes["crash"].excluded


def test_the_tree_is_printed_and_drawn(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tree = tree_of(store, idea("a"), idea("b", parent_id="a"), idea("c"))
    rescore(tree)
    tree.move("a", "running", "began")
    store.ingest()
    rows = queries.tree(store, "run")
    places = [(row["id"], row["depth"], row["status"]) for row in rows]
    assert places == [("a", 0, "running"), ("b", 1, "open"), ("c", 0, "open")]
    assert rows[0]["score"] == pytest.approx(tree.nodes["a"].idea.scores[-1].score)
    assert [a["status"] for a in queries.actions(store, "run")] == ["running"]
    png = figures.tree_png(rows)
    assert png.startswith(b"\x89PNG")
    assert png != figures.tree_png([{**row, "status": "failed"} for row in rows])
    assert len({mark for _, mark in figures.STYLE.values()}) == len(figures.STYLE)
