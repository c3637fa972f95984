"""Crash sets: the smallest combinations known to crash, hang, run out of memory or give wrong results.

They are left out of search on the versions they were seen on, until they end; after a change of version they are tried
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kb.clock import later
from kb.records import CrashSet, Evidence
from kb.store import Store
from kernels.identity import content_hash

SHELF_DAYS = 90.0
Value = str | int | float | bool


def record(
    store: Store,
    *,
    scope: Mapping[str, str],
    combination: Mapping[str, Value],
    failure: str,
    detail: str,
    versions: Mapping[str, str],
    because: str,
    at: str,
) -> CrashSet:
    """Keep a combination that failed. Seen again (another `because`), its count and its end move.

    Args:
        store: the knowledge base.
        scope: where it holds: operator, lever, engine, target.
        combination: knobs or parameters, as small as is known (`shrink`).
        failure: `crash`, `hang`, `out_of_memory`, `wrong_output`.
        detail: what was seen, in a sentence.
        versions: of what it was seen on.
        because: id of the trial, attempt or outcome.
        at: when.
    """
    key = [dict(scope), dict(combination), failure, dict(versions)]
    known = CrashSet(
        id=content_hash(key)[:24], scope=dict(scope), combination=dict(combination), failure=failure, detail=detail,
        versions=dict(versions), seen=0, expires=later(at, SHELF_DAYS),
    )  # fmt: skip
    store.write(known)
    store.write(
        Evidence(subject="crash_set", subject_id=known.id, effect="seen", because=because, at=at,
                 expires=later(at, SHELF_DAYS))
    )  # fmt: skip
    return known


def active(store: Store, *, scope: Mapping[str, str], versions: Mapping[str, str], at: str) -> list[CrashSet]:
    """Crash sets in force: their scope fits, every version that both name is the same, and they have not ended."""
    rows = store.query(
        "SELECT * FROM crash_sets_now WHERE retired IS NULL AND coalesce(expires, '9') > ? ORDER BY id", [at]
    )
    found = []
    for row in rows:
        fields = {name: row[name] for name in CrashSet.model_fields}
        for name in ("scope", "combination", "versions"):
            fields[name] = json.loads(row[name] or "{}")
        crash = CrashSet.model_validate(fields)
        fits = crash.scope.items() <= scope.items()
        if fits and all(crash.versions[k] == versions[k] for k in crash.versions.keys() & versions.keys()):
            found.append(crash)
    return found


def excluded(point: Mapping[str, Any], crash_sets: Iterable[CrashSet]) -> CrashSet | None:
    """The crash set that a point of a search falls into, or None."""
    return next((c for c in crash_sets if c.combination and c.combination.items() <= point.items()), None)


def shrink(
    combination: Mapping[str, Value],
    defaults: Mapping[str, Value],
    fails: Callable[[dict[str, Value]], bool],
    tries: int,
) -> dict[str, Value]:
    """The smallest part of a failing combination that still fails, by delta debugging (Zeller's ddmin).

    Args:
        combination: what failed.
        defaults: what to put in the place of what is left out.
        fails: runs a full combination and says whether it fails in the same way.
        tries: most calls of `fails`; when they are used up, the smallest found so far is returned.
    """
    kept = sorted(k for k, v in combination.items() if k not in defaults or defaults[k] != v)
    pieces = 2
    while len(kept) > 1 and tries > 0:
        size = -(-len(kept) // pieces)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        trials = chunks + ([[k for k in kept if k not in c] for c in chunks] if len(chunks) > 2 else [])
        smaller = None
        for names in trials:
            if tries == 0:
                break
            tries -= 1
            if fails({**defaults, **{k: combination[k] for k in names}}):
                smaller = names
                break
        if smaller is not None:
            pieces = max(2, pieces - 1) if len(smaller) > size else 2
            kept = smaller
        elif size == 1:
            break
        else:
            pieces = min(len(kept), pieces * 2)
    return {k: combination[k] for k in kept}
