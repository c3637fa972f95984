"""What happened goes into the memory, and every open idea is scored anew. Doing it twice counts once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kb import clock, crashes, ideas, lessons, rules, score
from kb.records import Claim, CrashSet, EndToEnd, Outcome, Profile, Record, Trial
from kb.store import IngestReport, Store
from tasks.agents.protocol import CampaignTask, Opportunity
from tasks.plan import newest


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What recording did."""

    rescored: int
    """Open ideas whose score changed."""
    head: str
    """Head of the ledger."""
    reopened: tuple[str, ...]
    """Settings ideas that were reopened."""


def record(store: Store, records: Sequence[Record]) -> IngestReport:
    """Write any records and ingest them."""
    for one in records:
        store.write(one)
    return store.ingest()


def record_trials(store: Store, trials: Sequence[Trial], profile: Profile | None = None) -> IngestReport:
    """Write the trials of a settings search (and a profile) and ingest them."""
    return record(store, [*trials, *([profile] if profile else [])])


def start(store: Store, task: CampaignTask, run_id: str) -> None:
    """The idea's campaign begins: it is `running`. Nothing happens where it is already."""
    store.ingest()
    tree = ideas.load(store, run_id, clock.now)
    if tree.nodes[task.idea.id].idea.status == "open":
        tree.move(task.idea.id, "running", f"campaign {task.campaign_id} began", task.campaign_id)
    store.ingest()


def record_outcome(
    store: Store,
    outcome: Outcome,
    *,
    task: CampaignTask | None = None,
    opportunities: Sequence[Opportunity] = (),
    peer_ratio: float | None = None,
    ruler: str | None = None,
) -> Recorded:
    """A campaign came to an end: outcome, claims, lesson, its idea's status, and new scores for every open idea.

    Args:
        store: the knowledge base.
        outcome: what it came to.
        task: the campaign's task, so that the rules and warm starts it had are counted.
        opportunities: the newest profile.
        peer_ratio: best peer's figure over today's.
        ruler: only results of this ruler's version count for chances.
    """
    store.ingest()
    store.write(outcome)
    if outcome.claims:
        store.write(Claim(run_id=outcome.run_id, subject=outcome.campaign_id, claims=outcome.claims, at=outcome.at))
    lessons.learn(store, outcome, used=task.warm_starts if task else ())
    if task is not None and task.scope_id is not None and outcome.conclusion != "failed":
        for row in store.query("SELECT unnest(from_json(rules, '[\"VARCHAR\"]')) AS id FROM scopes WHERE id = ?",
                               [task.scope_id]):  # fmt: skip
            rules.count(store, row["id"], outcome.campaign_id, won=outcome.conclusion == "won", at=outcome.at)
    tree = ideas.load(store, outcome.run_id, clock.now)
    ideas.conclude(tree, outcome)
    why = f"{outcome.lever} on {outcome.problem_name}: {outcome.conclusion.replace('_', ' ')}"
    family = outcome.provenance.target_family
    count = _rescore(
        store,
        tree,
        outcome.campaign_id,
        why,
        target_family=family,
        opportunities=opportunities,
        peer_ratio=peer_ratio,
        ruler=ruler,
    )
    return Recorded(*count, reopened=())


def record_end_to_end(
    store: Store,
    result: EndToEnd,
    *,
    opportunities: Sequence[Opportunity] = (),
    peer_ratio: float | None = None,
    ruler: str | None = None,
) -> Recorded:
    """An end-to-end decision: promotes or rejects its idea, reopens settings, rescores every open idea."""
    store.write(result)
    store.ingest()
    tree = ideas.load(store, result.run_id, clock.now)
    reopened = tuple(ideas.decide(tree, result))
    why = f"end to end: {result.decision}" + (f" at {result.ratio:.3f}×" if result.ratio else "")
    family = result.provenance.target_family
    count = _rescore(
        store,
        tree,
        result.id,
        why,
        target_family=family,
        opportunities=opportunities,
        peer_ratio=peer_ratio,
        ruler=ruler,
    )
    return Recorded(*count, reopened=reopened)


def record_crash(store: Store, **fields: Any) -> CrashSet:
    """Keep a combination that crashed (arguments of `kb.crashes.record`) and ingest it."""
    known = crashes.record(store, **fields)
    store.ingest()
    return known


def _rescore(
    store: Store,
    tree: ideas.Tree,
    cause: str,
    why: str,
    *,
    target_family: str,
    opportunities: Sequence[Opportunity],
    peer_ratio: float | None,
    ruler: str | None,
) -> tuple[int, str]:
    store.ingest()
    known = score.odds(store, ruler=ruler)
    now = newest(opportunities)
    done = tree.rescore(known, target_family=target_family, cause=cause, why=why, peer_ratio=peer_ratio, now=now)
    return len(done.scores) if done else 0, store.ingest().head
