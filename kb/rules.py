"""Rules: the instructions that agents are shown. Few: whoever adds one too many must edit or delete another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kb.records import Evidence, Rule
from kb.store import Store
from kernels.errors import InputError
from kernels.identity import content_hash

MOST = 12
"""Rules that are shown for a scope."""


def shown(store: Store, scope: Mapping[str, str]) -> list[Rule]:
    """Rules in force for a scope: it has the value of each key of their own. Best record first."""
    found = [rule for rule in in_force(store) if rule.scope.items() <= scope.items()]
    return sorted(found, key=lambda r: (r.losses - r.wins, r.id))[:MOST]


def in_force(store: Store) -> list[Rule]:
    """All rules that are not retired, with their record."""
    rows = store.query("SELECT * FROM rules_now WHERE retired IS NULL ORDER BY id")
    return [_rule(row) for row in rows]


def add(store: Store, text: str, scope: Mapping[str, str], origin: str) -> Rule:
    """Add a rule and make it known at once.

    Raises:
        InputError: more than `MOST` would be shown together somewhere.
    """
    rule = Rule(id=content_hash([text, dict(scope), origin])[:24], text=text, scope=dict(scope), origin=origin)
    others = [r for r in in_force(store) if r.id != rule.id and _compatible(r.scope, rule.scope)]
    for place in ({**rule.scope}, *({**r.scope, **rule.scope} for r in others)):
        together = [r for r in others if r.scope.items() <= place.items()]
        if len(together) >= MOST:
            worst = max(together, key=lambda r: (r.losses - r.wins, r.id))
            raise InputError(
                f"{len(together)} rules are shown for {place or 'every scope'} already, and {MOST} is the most.",
                remedy=f"Edit or delete one first; the one with the worst record is {worst.id}: {worst.text!r}.",
                key="rule",
            )
    store.write(rule)
    store.ingest()
    return rule


def edit(store: Store, rule_id: str, text: str, *, origin: str, at: str) -> Rule:
    """Put a new wording in a rule's place. The old one is retired and its record stays with it.

    Raises:
        InputError: there is no such rule in force.
    """
    old = next((r for r in in_force(store) if r.id == rule_id), None)
    if old is None:
        raise InputError(f"no rule {rule_id!r} is in force.", remedy="See roofloop kb rules.", key=rule_id)
    delete(store, rule_id, f"edited: {text}", at=at)
    return add(store, text, old.scope, origin)


def delete(store: Store, rule_id: str, reason: str, *, at: str) -> None:
    """Retire a rule: it is no longer shown, and kept."""
    store.write(Evidence(subject="rule", subject_id=rule_id, effect="retired", because=reason, at=at))
    store.ingest()


def count(store: Store, rule_id: str, outcome_id: str, *, won: bool, at: str) -> None:
    """Count an outcome for or against a rule that was in its scope."""
    effect: Any = "win" if won else "loss"
    store.write(Evidence(subject="rule", subject_id=rule_id, effect=effect, because=outcome_id, at=at))


def _compatible(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    return all(a[key] == b[key] for key in a.keys() & b.keys())


def _rule(row: dict[str, Any]) -> Rule:
    fields = {name: row[name] for name in Rule.model_fields if name in row}
    return Rule.model_validate({**fields, "scope": json.loads(row["scope"] or "{}")})
