"""The tree of ideas. Every change is a new file; the tree of today is what the files come to.

```
open ─► running ─► succeeded ─► promoted ─► deepened (its win lives on in a child)
  ▲        │            └─────► rejected
  │        └─► failed ─► abandoned
  └── any of failed, rejected, abandoned, expired, running (interrupted), promoted (settings: something changed)
```
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kb import score as scoring
from kb.files import write
from kb.kinds import kind_of
from kb.records import EndToEnd, Idea, IdeaEvent, IdeaStatus, Outcome, Rescore, ScoreParts
from kb.store import Store
from kernels.identity import content_hash

MOVES: Mapping[str, frozenset[str]] = {
    "open": frozenset({"running", "abandoned", "expired"}),
    "running": frozenset({"succeeded", "failed", "open", "abandoned"}),
    "succeeded": frozenset({"promoted", "rejected", "deepened", "open"}),
    "promoted": frozenset({"deepened", "expired", "open"}),
    "deepened": frozenset({"expired", "promoted"}),
    "failed": frozenset({"open", "abandoned"}),
    "rejected": frozenset({"open", "abandoned"}),
    "abandoned": frozenset({"open"}),
    "expired": frozenset({"open"}),
}
"""What may follow a status."""
GIVE_UP_AFTER = 3
"""Failures under one parent without a success after which its open children are abandoned."""


@dataclass(frozen=True)
class Node:
    """An idea with where it stands today."""

    idea: Idea
    """With today's status, reason and all its scores."""
    number: int
    """Number of its last change of status; 0 at birth."""
    excluded: str | None = None
    """Why it may not be picked."""

    @property
    def score(self) -> float:
        """Latest score; 0 where it has none or may not be picked."""
        return self.idea.scores[-1].score if self.idea.scores and not self.excluded else 0.0


class Tree:
    """The ideas of one run as they stand. Changes go through `move`, which writes a file and updates the tree."""

    def __init__(self, store: Store, run_id: str, nodes: Mapping[str, Node], clock: Callable[[], str]) -> None:
        self.store, self.run_id, self._clock = store, run_id, clock
        self.nodes = dict(nodes)

    def open(self) -> list[Node]:
        """Open ideas, best first; equal scores by id."""
        found = [node for node in self.nodes.values() if node.idea.status == "open"]
        return sorted(found, key=lambda n: (-n.score, n.idea.id))

    def children(self, idea_id: str | None) -> list[Node]:
        """Ideas below one, in the order of their ids; below None stand the roots."""
        return sorted((n for n in self.nodes.values() if n.idea.parent_id == idea_id), key=lambda n: n.idea.id)

    def add(self, idea: Idea) -> bool:
        """Add an idea; False where the run has one with this id already."""
        if idea.id in self.nodes:
            return False
        born = idea.model_copy(update={"status": "open", "reason": "", "scores": ()})
        self.store.write(born)
        self.nodes[idea.id] = Node(born, 0)
        return True

    def move(self, idea_id: str, status: IdeaStatus, reason: str, cause: str = "") -> None:
        """Change an idea's status. Nothing happens where it has that status already, by the same cause.

        Raises:
            KeyError: no such idea.
            ValueError: the status cannot follow, or another process changed the idea at the same moment.
        """
        node = self.nodes[idea_id]
        if node.idea.status == status:
            return
        if status not in MOVES[node.idea.status]:
            raise ValueError(f"idea {idea_id}: {status} cannot follow {node.idea.status}")
        event = IdeaEvent(
            run_id=self.run_id, idea_id=idea_id, number=node.number + 1, status=status, reason=reason, cause=cause,
            at=self._clock(),
        )  # fmt: skip
        path = write(self.store.root, event)
        if event.content_hash != IdeaEvent.model_validate(json.loads(path.read_bytes())["record"]).content_hash:
            raise ValueError(f"idea {idea_id}: another process changed it at the same moment")
        moved = node.idea.model_copy(update={"status": status, "reason": reason})
        self.nodes[idea_id] = Node(moved, node.number + 1, node.excluded)

    def rescore(
        self,
        known: scoring.Odds,
        *,
        target_family: str,
        cause: str,
        why: str,
        peer_ratio: float | None = None,
        now: Mapping[str, tuple[float, float]] | None = None,
        exclude: Mapping[str, str] | None = None,
    ) -> Rescore | None:
        """Score every open idea anew and keep the scores that changed, in one file. None where none changed.

        Args:
            known: the results so far (`kb.score.odds`).
            target_family: the widest pool.
            cause: id of what happened; the same cause is written once.
            why: what happened, in a sentence.
            peer_ratio: best peer's figure over today's.
            now: (time share, headroom) by problem name from the newest profile.
            exclude: further ideas that may not be picked, by id, with the reason (crash sets).
        """
        at = self._clock()
        nodes = sorted((n for n in self.nodes.values() if n.idea.status == "open"), key=lambda n: n.idea.id)
        parts = scoring.score(
            [n.idea for n in nodes], known, target_family=target_family, at=at, why=why, peer_ratio=peer_ratio, now=now
        )
        changed: dict[str, ScoreParts] = {}
        out: dict[str, str] = {}
        for node, new in zip(nodes, parts, strict=True):
            reason = (exclude or {}).get(node.idea.id) or scoring.excluded(node.idea)
            old = node.idea.scores[-1] if node.idea.scores else None
            same = old is not None and abs(old.score - new.score) <= 1e-12 and old.headroom == new.headroom
            if same and reason == node.excluded:
                continue
            changed[node.idea.id] = new
            if reason:
                out[node.idea.id] = reason
            scored = node.idea.model_copy(update={"scores": (*node.idea.scores, new)})
            self.nodes[node.idea.id] = Node(scored, node.number, reason)
        if not changed:
            return None
        ident = f"{self.run_id}-{content_hash([cause, {k: v.score for k, v in changed.items()}, out])[:16]}"
        record = Rescore.model_construct(id=ident, run_id=self.run_id, cause=cause, scores=changed, excluded=out, at=at)
        self.store.write(record)
        return record


def load(store: Store, run_id: str, clock: Callable[[], str]) -> Tree:
    """The tree of a run from the newest snapshot. Ingest before, so that what a killed process wrote is in it.

    Args:
        store: the knowledge base.
        run_id: the run.
        clock: gives the time for new records, ISO 8601 in UTC (`kb.clock.now`).
    """
    history: dict[str, list[ScoreParts]] = {}
    names = ("p_success", "gain", "urgency", "accuracy_penalty", "cost_minutes", "score", "time_share", "headroom")
    for row in store.query(
        "SELECT * FROM idea_events WHERE run_id = ? AND event <> 'status' ORDER BY at_utc, id", [run_id]
    ):
        part = ScoreParts.model_construct(**{n: row[n] for n in names}, why=row["reason"], at=row["at_utc"])
        history.setdefault(row["idea_id"], []).append(part)
    nodes: dict[str, Node] = {}
    for row in store.query(
        """SELECT i.* EXCLUDE (time_share, headroom), b.time_share, b.headroom
           FROM ideas_now i JOIN ideas b USING (id) WHERE i.run_id = ? ORDER BY i.id""",
        [run_id],
    ):
        fields = {name: row[name] for name in Idea.model_fields if name in row}
        for name in ("sites", "axes", "interacts_with"):
            fields[name] = json.loads(row[name] or "[]")
        idea = Idea.model_validate({**fields, "scores": ()})
        idea = idea.model_copy(update={"scores": tuple(history.get(idea.id, ()))})
        nodes[idea.id] = Node(idea, row["number"], row["why"] if row["excluded"] else None)
    return Tree(store, run_id, nodes, clock)


def idea_id(run_id: str, lever: str, problem_name: str | None, parent_id: str | None = None) -> str:
    """The same idea in the same run has the same id, whoever has it; a child of another parent is another idea."""
    return content_hash([run_id, lever, problem_name, parent_id])[:16]


def same_target(tree: Tree, lever: str, problem_name: str | None) -> Node | None:
    """An idea of the tree that pulls this lever on this problem, wherever it hangs."""
    found = (n for n in tree.nodes.values() if n.idea.lever == lever and n.idea.problem_name == problem_name)
    return min(found, key=lambda n: n.idea.id, default=None)


def conclude(tree: Tree, outcome: Outcome) -> None:
    """What a campaign's outcome does to its idea: success, failure, or back to open when only the tools failed.

    Nothing happens where this very outcome was dealt with before.
    """
    idea, cause = outcome.idea_id, kind_of(outcome).identify(outcome)
    done = "SELECT id FROM idea_events WHERE idea_id = ? AND cause = ? AND status <> 'running'"
    if idea not in tree.nodes or tree.store.query(done, [idea, cause]):
        return
    if tree.nodes[idea].idea.status == "open":
        tree.move(idea, "running", "its campaign was run", cause)
    if tree.nodes[idea].idea.status != "running":
        return
    if outcome.conclusion == "won":
        tree.move(idea, "succeeded", outcome.reason, cause)
    elif outcome.conclusion == "failed":
        before = "SELECT id FROM outcomes WHERE idea_id = ? AND conclusion = 'failed' AND id <> ?"
        failures = len(tree.store.query(before, [idea, cause])) + 1
        back = failures < GIVE_UP_AFTER
        told = f"tools failed {failures}×: {outcome.reason}"
        tree.move(idea, "open" if back else "abandoned", told, cause)
    else:
        tree.move(idea, "failed", outcome.reason, cause)
        backtrack(tree, idea, cause)


def backtrack(tree: Tree, failed_id: str, cause: str) -> None:
    """After a failure: a branch that failed often without a success has its open ideas abandoned, with the reason."""
    parent = tree.nodes[failed_id].idea.parent_id
    if parent is None:
        return
    siblings = tree.children(parent)
    good = sum(n.idea.status in ("succeeded", "promoted", "deepened") for n in siblings)
    bad = sum(n.idea.status in ("failed", "rejected", "abandoned") for n in siblings)
    if good == 0 and bad >= GIVE_UP_AFTER:
        for node in siblings:
            if node.idea.status == "open":
                reason = f"{bad} ideas of this branch failed and none succeeded"
                tree.move(node.idea.id, "abandoned", reason, cause)


def decide(tree: Tree, result: EndToEnd) -> list[str]:
    """What an end-to-end decision does: promotes or rejects its idea; a promotion supersedes ideas that it overlaps and
    reopens settings ideas that interact with its operator.

    Returns:
        Ids of the settings ideas that were reopened.
    """
    if result.idea_id is None or result.decision == "measured" or result.idea_id not in tree.nodes:
        return []
    node = tree.nodes[result.idea_id]
    if node.idea.status != "succeeded":
        return []
    if result.decision == "rejected":
        tree.move(result.idea_id, "rejected", result.reason, result.id)
        return []
    tree.move(result.idea_id, "promoted", result.reason, result.id)
    reopened = []
    for other in sorted(tree.nodes.values(), key=lambda n: n.idea.id):
        if other.idea.id == result.idea_id:
            continue
        if other.idea.status == "promoted" and set(other.idea.sites) & set(node.idea.sites):
            tree.move(other.idea.id, "deepened", f"its sites were taken over by {node.idea.lever}", result.id)
        settled = other.idea.layer == "settings" and other.idea.status not in ("open", "running", "deepened")
        if settled and node.idea.operator in other.idea.interacts_with:
            why = f"a promoted kernel for {node.idea.operator} changes what it is worth"
            tree.move(other.idea.id, "open", why, result.id)
            reopened.append(other.idea.id)
    return reopened


def pick(
    tree: Tree, count: int, *, least_score: float = 0.0, layers: Sequence[str] = ("settings", "framework", "kernel")
) -> tuple[list[Node], dict[str, str]]:
    """The best open ideas that can be worked on at once.

    Args:
        tree: scored.
        count: most ideas to take.
        least_score: ideas at or below it are left.
        layers: layers to pick from.

    Returns:
        (ideas, best first; why each better one that was passed over was passed over, by id).
    """
    taken: list[Node] = []
    passed: dict[str, str] = {}
    for node in tree.open():
        if len(taken) == count:
            break
        if node.excluded:
            passed[node.idea.id] = node.excluded
            continue
        if node.score <= least_score or node.idea.layer not in layers:
            continue
        clash = next((t for t in taken if set(t.idea.sites) & set(node.idea.sites)), None)
        if clash is not None:
            passed[node.idea.id] = f"it takes the same place in the model as {clash.idea.lever}, which scores higher"
            continue
        taken.append(node)
    return taken, passed


def depth_first(tree: Tree) -> Sequence[tuple[int, Node]]:
    """(depth, node) of the whole tree, siblings by falling score."""

    def below(parent: str | None, depth: int) -> list[tuple[int, Node]]:
        rows: list[tuple[int, Node]] = []
        known = tree.children(parent)
        if parent is None:
            known += [n for n in tree.nodes.values() if n.idea.parent_id and n.idea.parent_id not in tree.nodes]
        for node in sorted(known, key=lambda n: (-_last_score(n), n.idea.id)):
            rows.append((depth, node))
            rows += below(node.idea.id, depth + 1)
        return rows

    return below(None, 0)


def _last_score(node: Node) -> float:
    return node.idea.scores[-1].score if node.idea.scores else 0.0
