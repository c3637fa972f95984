"""One planning round: what the planner proposes enters the tree, every open idea is scored, the best are picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kb import clock, crashes, ideas, lessons, rules, score
from kb.records import Attempt, Claim, Idea, Layer, Scope
from kb.store import Store
from kernels.identity import content_hash
from tasks.agents.protocol import CampaignTask, Left, Opportunity, PlanContext, Planner, Proposal, SettingsResult


@dataclass(frozen=True)
class Worth:
    """The exchange rate between gain and cost."""

    gain_per_minute: float = 0.0005
    """Least expected end-to-end gain (fraction of today's time) that a minute must bring."""
    least_gain: float = 0.003
    """Expected gains below this are lost in the noise of an end-to-end measurement."""
    closed_gap: float = 0.02
    """The gap is closed when no more than this share of the time could go away."""


@dataclass(frozen=True)
class RoundPlan:
    """What a planning round came to."""

    ideas: tuple[Idea, ...]
    """To be run now, best first; empty when `stop` says why."""
    stop: str | None
    """Why no further campaign is run."""
    added: tuple[str, ...]
    """Ids of ideas that are new in the tree."""
    passed_over: dict[str, str]
    """Better-scored ideas that were not picked, by id, with the reason."""
    scope_id: str


def context_of(
    store: Store,
    *,
    run_id: str,
    round_number: int,
    target: str,
    target_family: str,
    engine: str,
    dtype: str,
    opportunities: Sequence[Opportunity],
    settings: SettingsResult | None,
    left: Left,
    campaign_s: float,
    peer_ratio: float | None = None,
    seed: int = 0,
) -> PlanContext:
    """The planner's view: what was measured, joined with what is remembered."""
    store.ingest()
    at = clock.now()
    scope = {"target": target, "target_family": target_family, "engine": engine, "dtype": dtype}
    tree = ideas.load(store, run_id, clock.now)
    return PlanContext(
        run_id=run_id,
        round=round_number,
        target=target,
        target_family=target_family,
        engine=engine,
        dtype=dtype,
        opportunities=tuple(opportunities),
        settings=settings,
        ideas=tuple(node.idea for node in tree.nodes.values()),
        lessons=tuple(lessons.active(store, at=at)),
        rules=tuple(rules.shown(store, scope)),
        crash_sets=tuple(crashes.active(store, scope=scope, versions={"engine": engine, "target": target}, at=at)),
        left=left,
        campaign_s=campaign_s,
        peer_ratio=peer_ratio,
        seed=seed,
    )


def plan_round(
    store: Store,
    planner: Planner,
    context: PlanContext,
    *,
    count: int,
    layers: Sequence[Layer] = ("framework", "kernel"),
    ruler: str | None = None,
    worth: Worth | None = None,
) -> RoundPlan:
    """Ask the planner, keep its ideas, score all open ones and pick the best that do not overlap.

    Args:
        store: the knowledge base; all of it is written and ingested.
        planner: who proposes.
        context: what it may see.
        count: most ideas to pick.
        layers: layers to pick from; settings ideas need a search of the settings, not a campaign.
        ruler: only results of this ruler's version count for the chance of success.
        worth: exchange rate of the stop rule.
    """
    tree = ideas.load(store, context.run_id, clock.now)
    scope = _keep_scope(store, context)
    added = [i for p in planner.plan(context) if (i := _admit(store, tree, context, p, scope.id)) is not None]
    seen = {o.problem.name for o in context.opportunities}
    # What the profile no longer shows (a fused kernel took it over) has nothing left to give.
    names = {n.idea.problem_name for n in tree.open() if n.idea.problem_name}
    gone = dict.fromkeys(names - seen, (0.0, 1.0))
    tree.rescore(
        score.odds(store, ruler=ruler),
        target_family=context.target_family,
        cause=f"round-{context.round}",
        why=f"round {context.round} was planned from a new profile",
        peer_ratio=context.peer_ratio,
        now=gone | newest(context.opportunities),
    )
    stop = stop_reason(tree, context, worth or Worth(), layers)
    picked, passed = ([], {}) if stop else ideas.pick(tree, count, layers=layers)
    store.ingest()
    return RoundPlan(tuple(node.idea for node in picked), stop, tuple(added), passed, scope.id)


def newest(opportunities: Sequence[Opportunity]) -> dict[str, tuple[float, float]]:
    """(time share, headroom) by problem name, for `kb.ideas.Tree.rescore`."""
    return {o.problem.name: (o.time_share, o.headroom) for o in opportunities if o.headroom is not None}


def _admit(store: Store, tree: ideas.Tree, context: PlanContext, p: Proposal, scope_id: str) -> str | None:
    """Put a proposal into the tree; None where the tree has it, or its problem is not in the profile."""
    by_name = {o.problem.name: o for o in context.opportunities}
    one = by_name.get(p.problem_name or "")
    unknown = p.problem_name is not None and one is None
    if unknown or ideas.same_target(tree, p.lever, p.problem_name) is not None:
        return None
    assumed = p.headroom if one is None or one.headroom is None else one.headroom
    idea = Idea(
        id=ideas.idea_id(context.run_id, p.lever, p.problem_name, p.parent_id),
        run_id=context.run_id,
        parent_id=p.parent_id if p.parent_id in tree.nodes else None,
        hypothesis=p.hypothesis,
        layer=p.layer,
        lever=p.lever,
        operator=p.operator,
        problem_id=one.problem.id if one else None,
        problem_name=p.problem_name,
        approach=p.approach,
        time_share=min(1.0, max(0.0, one.time_share if one else p.time_share)),
        headroom=max(1.0, assumed),
        derivation=p.derivation,
        accuracy_risk=p.accuracy_risk,
        crash_risk=p.crash_risk,
        cost_minutes=p.cost_minutes,
        sites=one.sites if one else (),
        axes=one.problem.axis_values(one.shape) if one else {},
        interacts_with=p.interacts_with,
        scope_id=scope_id,
    )
    if not tree.add(idea):
        return None
    if p.claims:
        store.write(Claim(run_id=context.run_id, subject=idea.id, claims=dict(p.claims), at=clock.now()))
    if p.settled:
        tree.move(idea.id, "expired", p.settled)
    return idea.id


def stop_reason(tree: ideas.Tree, context: PlanContext, worth: Worth, layers: Sequence[Layer]) -> str | None:
    """Why the loop should end now, or None: budget, gap closed, or no idea worth its cost."""
    left = context.left
    if left.campaigns <= 0:
        return "budget: no campaigns are left"
    if left.wall_s < context.campaign_s:
        return f"budget: {left.wall_s:.0f} s are left, a campaign takes {context.campaign_s:.0f} s"
    known = [o for o in context.opportunities if o.headroom is not None]
    if known and len(known) == len(context.opportunities):
        gap = max(o.time_share * (1 - 1 / max(1.0, o.headroom or 1.0)) for o in known)
        if gap < worth.closed_gap:
            return f"gap closed: no operator is further than {gap:.1%} of the time from its roofline"
    best = [n for n in tree.open() if not n.excluded and n.idea.layer in layers and n.idea.scores]
    if not best:
        return "no open idea is left"
    values = [(n.idea.scores[-1].p_success * n.idea.scores[-1].gain, n) for n in best]
    if any(g >= max(worth.least_gain, worth.gain_per_minute * n.idea.cost_minutes) for g, n in values):
        return None
    gain, node = max(values, key=lambda v: (v[0], v[1].idea.id))
    return (
        f"no idea is worth its cost: the best, {node.idea.lever}, is expected to give {gain:.2%} "
        f"for {node.idea.cost_minutes:.1f} min"
    )


def task_for(
    store: Store,
    context: PlanContext,
    idea: Idea,
    *,
    campaign_id: str,
    budget_s: float,
    threads: int,
    builds: Path,
    cache_state: Literal["warm", "cold"] = "warm",
    languages: Sequence[str] = ("cpp",),
    finished: Sequence[Attempt] = (),
) -> CampaignTask:
    """An idea as a task for an executor, with what is known of like problems; what it is shown is kept as its scope.

    Raises:
        KeyError: the idea's problem is not among the context's opportunities.
    """
    one = next((o for o in context.opportunities if o.problem.name == idea.problem_name), None)
    if one is None:
        raise KeyError(idea.problem_name)
    at = clock.now()
    axes = one.problem.axis_values(one.shape)
    starts = lessons.warm_starts(
        store, operator=idea.operator, axes=axes, dtype=one.problem.cost.dtype, target=context.target,
        engine=context.engine, at=at, lever=idea.lever,
    )  # fmt: skip
    where = {
        "operator": idea.operator, "lever": idea.lever, "engine": context.engine, "target": context.target,
        "target_family": context.target_family, "dtype": one.problem.cost.dtype,
    }  # fmt: skip
    bad = crashes.active(store, scope=where, versions={"engine": context.engine, "target": context.target}, at=at)
    shown = rules.shown(store, where)
    known = [x for x in context.lessons if x.operator == idea.operator][:10]
    text = "\n".join(
        [
            f"Idea: {idea.hypothesis}", f"Why: {idea.derivation}", f"Problem: {one.problem.name} at {axes}",
            *(f"Rule: {r.text}" for r in shown), *(f"Lesson: {x.statement}" for x in known),
            *(f"Try first: {s.parameters} — {s.note}" for s in starts),
            *(f"Never: {c.combination} — {c.failure}: {c.detail}" for c in bad),
        ]
    )  # fmt: skip
    scope = Scope(
        id=f"{campaign_id}-{content_hash(text)[:12]}", run_id=context.run_id, purpose=f"campaign:{campaign_id}",
        text=text, lessons=tuple(dict.fromkeys([x.id for x in known] + [s.lesson_id for s in starts])),
        rules=tuple(r.id for r in shown), crash_sets=tuple(c.id for c in bad), at=at,
    )  # fmt: skip
    store.write(scope)
    template = idea.approach.removeprefix("template:")
    families = (template,) if idea.approach.startswith("template:") else ()
    return CampaignTask(
        campaign_id=campaign_id, idea=idea, problem=one.problem, families=families, languages=tuple(languages),
        budget_s=budget_s, seed=int(content_hash([context.seed, idea.id])[:8], 16), threads=threads, builds=builds,
        cache_state=cache_state, scope=text, scope_id=scope.id, warm_starts=starts, crash_sets=tuple(bad),
        finished=tuple(finished), tokens=context.left.tokens, dollars=context.left.dollars,
    )  # fmt: skip


def _keep_scope(store: Store, context: PlanContext) -> Scope:
    text = describe(context)
    scope = Scope(
        id=f"{context.run_id}-plan-{context.round}-{content_hash(text)[:12]}",
        run_id=context.run_id, purpose="plan", text=text,
        lessons=tuple(x.id for x in context.lessons), rules=tuple(r.id for r in context.rules),
        crash_sets=tuple(c.id for c in context.crash_sets), at=clock.now(),
    )  # fmt: skip
    store.write(scope)
    return scope


def describe(context: PlanContext) -> str:
    """The context in words, as it is kept in `scopes`: the profile, the settings, the tree, what is known."""
    rows = [f"Round {context.round} on {context.engine}, {context.dtype}, target {context.target}."]
    for o in sorted(context.opportunities, key=lambda o: (-o.time_share, o.problem.name)):
        gap = "ceiling unknown" if o.headroom is None else f"{o.headroom:.2f}× its roofline ({o.bound})"
        templates = ", ".join(o.families) or "–"
        rows.append(f"{o.problem.name}: {o.time_share:.1%} of the time, {gap}; templates: {templates}")
    if context.settings:
        s = context.settings
        rows.append(f"Settings: {s.metric} {s.stock_value} stock, {s.best_value} best, {dict(s.best_knobs)}")
    rows += [f"Idea {i.id} [{i.status}] {i.lever} on {i.problem_name or '–'}" for i in context.ideas]
    rows += [f"Lesson: {x.statement}" for x in context.lessons] + [f"Rule: {r.text}" for r in context.rules]
    return "\n".join([*rows, f"Left: {context.left}"])
