"""What was tried: campaigns with their verdicts, the tree of ideas, and everything that was refused, with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kb import queries
from kb.store import Store
from kernels.errors import InputError
from kernels.ruler.verdict import Verdict, visible
from tasks.propose import MEASURED
from tasks.report_layers import interval
from tasks.report_schema import CampaignRow, Interval, Refusal
from tasks.report_words import pairs
from tasks.run_state import read_json

IDEA = (
    "id", "parent_id", "depth", "hypothesis", "layer", "lever", "operator", "problem_name", "status", "reason",
    "derivation", "score", "p_success", "gain", "urgency", "accuracy_penalty", "cost_minutes", "excluded",
)  # fmt: skip
ATTEMPT = ("number", "mode", "status", "speedup", "low", "high", "claim", "parameters", "seconds", "note")
TRIAL = ("number", "role", "knobs", "status", "value", "reason", "seconds", "resolved_hash")


def attempts_of(home: Path) -> tuple[dict[str, Any], ...]:
    """Attempts of the campaign in `home`, by number."""
    held = (read_json(file) for file in sorted(home.glob("attempts/*.json")))
    return tuple({key: value.get(key) for key in ATTEMPT} for value in held if value)


def trials_of(search: Mapping[str, Any] | None) -> tuple[dict[str, Any], ...]:
    """Trials of the settings search, by number."""
    return tuple({key: trial.get(key) for key in TRIAL} for trial in (search or {}).get("trials", ()))


def ideas_of(store: Store, run_id: str) -> tuple[dict[str, Any], ...]:
    """The run's tree of ideas, depth first; empty before the first plan."""
    try:
        rows = queries.tree(store, run_id)
    except InputError:
        return ()
    return tuple({key: row.get(key) for key in IDEA} for row in rows)


def campaigns_of(folder: Path, evaluations: Sequence[Mapping[str, Any]]) -> tuple[CampaignRow, ...]:
    """The run's campaigns, by round, what was promoted first.

    Of their problems and verdicts only what agents may see is taken.
    """
    tested = {key: e for e in evaluations for key in e["campaigns"]}
    held = ((path.parent, read_json(path)) for path in sorted(folder.glob("campaigns/*/campaign.json")))
    rows = [_row(home, head, tested.get(home.name)) for home, head in held if head]
    return tuple(sorted(rows, key=lambda row: (row.round, row.decision != "promoted", row.conclusion != "won")))


def _row(home: Path, head: Mapping[str, Any], tested: Mapping[str, Any] | None) -> CampaignRow:
    idea, outcome = head["task"]["idea"], read_json(home / "outcome.json") or {}
    speedup = None
    if outcome.get("speedup") is not None:
        speedup = Interval(estimate=outcome["speedup"], low=outcome["low"], high=outcome["high"])
    said, damage = _verdict(home, outcome)
    return CampaignRow(
        campaign_id=home.name,
        round=head.get("round", 0),
        hypothesis=idea["hypothesis"],
        layer=idea.get("layer", "kernel"),
        operator=idea["operator"],
        problem=head["task"]["problem"]["name"],
        lever=idea["lever"],
        conclusion=outcome.get("conclusion", "unfinished"),
        reason=outcome.get("reason", "it has not concluded") + damage,
        speedup=speedup,
        claim=said.get("claim"),
        floor_fraction=said.get("floor_fraction"),
        attempts=attempts_of(home),
        seconds=outcome.get("seconds", 0.0),
        end_to_end=interval(tested["comparison"]["interval"]) if tested else None,
        decision=tested["decision"]["decision"] if tested else "",
    )


def _verdict(home: Path, outcome: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What may be shown of the verdict that the outcome stands on; and what is wrong with its file, if anything."""
    for mode in ("confirm", "screen"):
        held = read_json(home / "verdicts" / f"{outcome.get('candidate_id')}.{mode}.json")
        if held and held.get("id") == outcome.get("verdict_id"):
            try:
                return visible(Verdict.from_json(held)), ""
            except ValueError as error:
                return {}, f" (Its verdict cannot be read: {error}.)"
    return {}, ""


def refused_of(
    search: Mapping[str, Any] | None,
    campaigns: Sequence[CampaignRow],
    evaluations: Sequence[Mapping[str, Any]],
    plans: Mapping[int, Mapping[str, Any]],
    ideas: Sequence[Mapping[str, Any]],
    *,
    ended: bool,
) -> tuple[Refusal, ...]:
    """Everything that was tried or thought of and not kept, in the order of the loop.

    Args:
        search: the settings search's result.
        campaigns: those of the run.
        evaluations: results of the end-to-end stages in the order of time.
        plans: results of the planning stages, by round.
        ideas: of `ideas_of`.
        ended: the rounds are over: a winner that was not tested by now never will be.
    """
    found = [*_settings(search or {}), *_plans(plans, ideas)]
    for one in campaigns:
        what = f"{one.problem}, {one.lever}"
        if one.conclusion not in ("won", "unfinished"):
            reason = f"{one.conclusion.replace('_', ' ')}: {one.reason}"
            found.append(Refusal(what=what, layer=one.layer, stage="ruler", reason=reason))
        elif one.conclusion == "won" and not one.decision and ended:
            reason = "it won its campaign, but no time was left to measure it end to end"
            found.append(Refusal(what=what, layer=one.layer, stage="end_to_end", reason=reason))
    named = {one.campaign_id: one for one in campaigns}
    for evaluation in evaluations:
        if not evaluation["promoted"]:
            tested = [named[key] for key in evaluation["campaigns"] if key in named]
            what = " + ".join(f"{one.problem}, {one.lever}" for one in tested) or "an unknown campaign"
            layer = tested[0].layer if tested else "kernel"
            found.append(
                Refusal(what=what, layer=layer, stage="end_to_end", reason=evaluation["decision"]["reason"])
            )  # fmt: skip
    return tuple(found)


def _settings(search: Mapping[str, Any]) -> list[Refusal]:
    found = []
    for trial in search.get("trials", ()):
        if trial["status"] not in MEASURED:
            reason = f"{trial['status'].replace('_', ' ')}: {trial['reason']}"
            what = pairs(trial["knobs"]) or "the engine's defaults"
            found.append(Refusal(what=what, layer="settings", stage="settings", reason=reason))
    for confirmation in search.get("confirmations", ()):
        if not confirmation["better"]:
            what = "settings that were ahead in the search"
            found.append(Refusal(what=what, layer="settings", stage="settings", reason=confirmation["reason"]))
    return found


def _plans(plans: Mapping[int, Mapping[str, Any]], ideas: Sequence[Mapping[str, Any]]) -> list[Refusal]:
    """Ideas given up by the tree, and those passed over that are still open: what was tried later is no refusal."""
    found = []
    passed = {key: (number, why) for number, plan in plans.items() for key, why in plan.get("passed_over", {}).items()}
    for idea in ideas:
        what = f"{idea['problem_name'] or idea['operator']}, {idea['lever']}"
        if idea["status"] == "abandoned":
            reason = f"abandoned: {idea['reason']}"
        elif idea["status"] == "open" and idea["id"] in passed:
            reason = "passed over in round {}: {}".format(*passed[idea["id"]])
        else:
            continue
        found.append(Refusal(what=what, layer=idea["layer"], stage="plan", reason=reason))
    return found
