"""The planner without a model: ideas follow from the profile, the templates and the settings trials by fixed rules.

Same context, same proposals. One kernel idea per operator and shape class, on the problem of that class that takes most
time; a success brings its sibling shapes and other templates, a failure the next template.
"""

from __future__ import annotations

from collections.abc import Iterable

from kb.lessons import shape_class
from kb.records import Idea
from tasks.agents.protocol import Opportunity, PlanContext, Proposal, SettingsResult
from tasks.propose import MEASURED

ASSUMED_HEADROOM = 1.5
"""Where no ceiling can be trusted: enough to be tried, too little to come before a gap that was measured."""
KNOB_HEADROOM = 0.10
"""Most that a knob is expected to give again, as a fraction, after what it interacts with has changed."""
UNSEEN_KNOB = 0.02
"""The same for a knob that no trial turned."""
SIBLING_COST = 0.4
"""Cost of a sibling shape, which starts from a tuned configuration, over that of a first campaign."""
_WORKED = ("succeeded", "promoted", "deepened")
_DID_NOT = ("failed", "rejected")


class OfflinePlanner:
    """`Planner` by rules."""

    def plan(self, context: PlanContext) -> list[Proposal]:
        """New ideas for what the context shows; see the module's words for the rules."""
        have = {(idea.lever, idea.problem_name) for idea in context.ideas}
        proposals: list[Proposal] = []
        for proposal in (*_first(context), *_grown(context), *_knobs(context.settings)):
            key = (proposal.lever, proposal.problem_name)
            if key not in have:
                have.add(key)
                proposals.append(proposal)
        return proposals


def _first(context: PlanContext) -> Iterable[Proposal]:
    groups: dict[tuple[str, str], list[Opportunity]] = {}
    for one in sorted(context.opportunities, key=lambda o: (-o.time_share, o.problem.name)):
        if one.families:
            key = (one.problem.operator, shape_class(one.problem.axis_values(one.shape)))
            groups.setdefault(key, []).append(one)
    begun = {(i.operator, shape_class(i.axes)) for i in context.ideas if i.layer == "kernel"}
    for key, group in groups.items():
        if key not in begun:
            yield _kernel(context, group[0], group[0].families[0], shapes=len(group))


def _grown(context: PlanContext) -> Iterable[Proposal]:
    by_name = {o.problem.name: o for o in context.opportunities}
    for idea in sorted(context.ideas, key=lambda i: i.id):
        own = by_name.get(idea.problem_name or "")
        if idea.layer != "kernel" or idea.status not in (*_WORKED, *_DID_NOT):
            continue
        if idea.status in _WORKED:
            family = idea.approach.removeprefix("template:")
            for one in context.opportunities:
                sibling = one.problem.operator == idea.operator and one.problem.name != idea.problem_name
                if sibling and family in one.families:
                    yield _kernel(context, one, family, parent=idea)
        if own is not None:
            for family in own.families:
                yield _kernel(context, own, family, parent=idea, neighbour=True)


def _kernel(
    context: PlanContext,
    one: Opportunity,
    family: str,
    *,
    shapes: int = 1,
    parent: Idea | None = None,
    neighbour: bool = False,
) -> Proposal:
    operator = one.problem.operator
    headroom = ASSUMED_HEADROOM if one.headroom is None else one.headroom
    share = f"{one.time_share:.1%} of the time"
    if one.headroom is None:
        derivation = f"{share}; no ceiling can be trusted, so {ASSUMED_HEADROOM}× to the roofline is assumed"
    else:
        derivation = f"{share} at {headroom:.2f}× its roofline ({one.bound})"
    derivation += f": at most {one.time_share * (1 - 1 / max(1.0, headroom)):.1%} of the time can go away"
    if shapes > 1:
        derivation += f"; {shapes - 1} more shapes of this class follow when it wins"
    if parent is None and one.covers:
        hypothesis = f"One {operator} kernel for {' + '.join(one.covers)} keeps what lies between out of memory."
    elif parent is None:
        hypothesis = f"A tuned {family} kernel for {one.problem.name} comes closer to its {one.bound} roofline."
    elif neighbour:
        hypothesis = f"Where {parent.approach} {parent.status}, {family} may do better on {one.problem.name}."
    else:
        hypothesis = f"What worked on {parent.problem_name} also works on its sibling {one.problem.name}."
    cost = context.campaign_s / 60.0
    return Proposal(
        hypothesis=hypothesis,
        layer="kernel",
        lever=f"{operator} × template:{family}",
        operator=operator,
        approach=f"template:{family}",
        derivation=derivation,
        problem_name=one.problem.name,
        parent_id=None if parent is None else parent.id,
        cost_minutes=cost * (SIBLING_COST if parent is not None and not neighbour else 1.0),
    )


def _knobs(settings: SettingsResult | None) -> Iterable[Proposal]:
    """One idea per knob: what it was worth among the trials it may be worth again when its neighbours change."""
    if settings is None:
        return
    for knob in sorted(settings.knobs, key=lambda k: k.name):
        best: dict[object, float] = {}
        for trial in settings.trials:
            if trial.status in MEASURED and trial.value:
                value = trial.resolved.get(knob.name, trial.knobs.get(knob.name, knob.default))
                figure = 1.0 / trial.value if settings.metric.endswith("_ms") else trial.value
                best[value] = max(figure, best.get(value, 0.0))
        spread = max(best.values()) / min(best.values()) - 1.0 if len(best) > 1 else UNSEEN_KNOB
        left = min(KNOB_HEADROOM, spread)
        seen = f"{len(best)} of {len(knob.choices)} values tried, {spread:.1%} apart at their best"
        yield Proposal(
            hypothesis=f"Another value of {knob.name} ({knob.help.rstrip('.')}) is faster.",
            layer="settings",
            lever=f"knobs: {knob.name}",
            operator="settings",
            approach="settings",
            derivation=f"{seen}: at most {left:.1%} more is expected of it",
            time_share=1.0,
            headroom=1.0 + left,
            cost_minutes=1.0,
            interacts_with=knob.interacts_with,
            settled=_settled(knob.name, len(best), len(knob.choices), settings),
        )


def _settled(name: str, tried: int, choices: int, settings: SettingsResult) -> str | None:
    if tried < choices:
        return None
    kept = settings.best_knobs.get(name)
    return f"the settings search tried all {choices} values" + ("" if kept is None else f" and kept {kept!r}")
