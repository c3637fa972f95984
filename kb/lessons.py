"""Lessons: what outcomes taught, under which conditions, until when.

A lesson's key is operator, shape, dtype, target, engine and lever. Wins and losses are counted from `evidence`, one per
outcome, so that two processes that learn at once do not overwrite each other. A lesson that was retired is kept.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from kb.clock import later
from kb.records import Evidence, Lesson, Outcome, Rule, WarmStart
from kb.store import Store
from kernels.errors import InputError
from kernels.identity import content_hash

SHELF_DAYS = 180.0
"""A lesson ends this long after it was last confirmed."""
ANY = "any"
"""In a lesson's target, engine or dtype: it holds for all of them."""
FARTHEST = 8.0
"""Doublings beyond which a shape is not like another: the sum over all axes of |log2(a/b)|."""
_RELAX = ("shape", "engine", "target", "dtype")


def shape_class(axes: Mapping[str, int]) -> str:
    """Axes rounded to powers of four, in alphabetical order: `k1024 m16 n1024`. Shapes of one class share campaigns."""
    return " ".join(f"{name}{4 ** round(math.log(max(1, value), 4))}" for name, value in sorted(axes.items()))


def distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """How far two shapes are apart: the sum over the axes of |log2(a/b)|, in doublings. Infinite where axes differ."""
    if a.keys() != b.keys():
        return math.inf
    return sum(abs(math.log2(max(1, a[name]) / max(1, b[name]))) for name in a)


def lesson_of(outcome: Outcome) -> Lesson | None:
    """The lesson that an outcome teaches; None for one whose tools failed, which teaches nothing about the idea.

    Equal key and parameters give the same id: seen again, it is confirmed and not learnt twice.
    """
    if outcome.conclusion == "failed":
        return None
    won = outcome.conclusion == "won"
    where = " ".join(f"{k}={v}" for k, v in sorted(outcome.axes.items())) or outcome.problem_name
    if won:
        gain = "" if outcome.speedup is None else f" {outcome.speedup:.2f}×"
        statement = f"{outcome.lever} won{gain} on {where} ({outcome.dtype or 'any dtype'})."
    else:
        statement = f"{outcome.lever} did not win on {where}: {outcome.reason}"
    key: dict[str, Any] = {
        "operator": outcome.operator,
        "shape_class": shape_class(outcome.axes),
        "dtype": outcome.dtype,
        "target": outcome.provenance.target,
        "engine": outcome.provenance.engine,
        "lever": outcome.lever,
        "axes": dict(outcome.axes),
        "parameters": dict(outcome.parameters) if won else {},
    }
    return Lesson(
        id=content_hash([key, won])[:24], **key, statement=statement, speedup=outcome.speedup, source="outcome",
        last_confirmed=outcome.at, expires=later(outcome.at, SHELF_DAYS),
    )  # fmt: skip


def learn(store: Store, outcome: Outcome, *, used: tuple[WarmStart, ...] = ()) -> Lesson | None:
    """Write what an outcome teaches, and count it for or against the lessons that warm-started it.

    A warm start wins when the campaign's best has its very parameters, or the campaign won; it loses when the campaign
    came to an end without a win.
    """
    lesson = lesson_of(outcome)
    if lesson is None:
        return None
    store.write(lesson)
    won = outcome.conclusion == "won"
    _evidence(store, lesson.id, "win" if won else "loss", outcome, later(outcome.at, SHELF_DAYS))
    for start in used:
        if start.lesson_id == lesson.id:
            continue
        expires = later(outcome.at, SHELF_DAYS) if won else None
        _evidence(store, start.lesson_id, "win" if won else "loss", outcome, expires)
    return lesson


def _evidence(store: Store, lesson_id: str, effect: Any, outcome: Outcome, expires: str | None) -> None:
    store.write(
        Evidence(subject="lesson", subject_id=lesson_id, effect=effect, because=outcome.campaign_id, at=outcome.at,
                 expires=expires)
    )  # fmt: skip


def retire(store: Store, lesson_id: str, reason: str, at: str) -> None:
    """Take a lesson out of use; it is kept and can be restored."""
    store.write(Evidence(subject="lesson", subject_id=lesson_id, effect="retired", because=reason, at=at))


def restore(store: Store, lesson_id: str, reason: str, at: str) -> None:
    """Put a retired lesson back into use."""
    store.write(Evidence(subject="lesson", subject_id=lesson_id, effect="restored", because=reason, at=at))


def active(store: Store, *, at: str, operator: str | None = None) -> list[Lesson]:
    """Lessons in use at a time: not expired, not retired, by falling record."""
    rows = store.query(
        """SELECT * FROM lessons_now WHERE retired IS NULL AND (expires IS NULL OR expires > $at)
           AND ($operator IS NULL OR operator = $operator) ORDER BY wins - losses DESC, last_confirmed DESC, id""",
        {"at": at, "operator": operator},
    )
    return [_lesson(row) for row in rows]


def _lesson(row: dict[str, Any]) -> Lesson:
    fields = {name: row[name] for name in Lesson.model_fields if name in row}
    for name in ("axes", "parameters", "evidence"):
        fields[name] = json.loads(row[name] or "[]") if name == "evidence" else json.loads(row[name] or "{}")
    return Lesson.model_validate(fields)


def warm_starts(
    store: Store,
    *,
    operator: str,
    axes: Mapping[str, int],
    dtype: str,
    target: str,
    engine: str,
    at: str,
    lever: str | None = None,
    limit: int = 3,
) -> tuple[WarmStart, ...]:
    """Tuned configurations of like problems, the most alike first.

    The operator must be the same (and the lever, where given). Then the key is relaxed one field at a time, in this
    order: shape (nearest first, by `distance`, up to `FARTHEST`), engine, target, dtype. Each answer says what was
    given up. Lessons with more losses than wins are left out.
    """
    found: list[tuple[int, float, int, str, Lesson, tuple[str, ...]]] = []
    for lesson in active(store, at=at, operator=operator):
        apart = distance(axes, lesson.axes)
        lost = lesson.losses > lesson.wins
        if not lesson.parameters or apart > FARTHEST or lost or (lever is not None and lesson.lever != lever):
            continue
        differs = {
            "shape": apart > 0,
            "engine": lesson.engine not in (engine, ANY),
            "target": lesson.target not in (target, ANY),
            "dtype": lesson.dtype not in (dtype, ANY),
        }
        relaxed = tuple(name for name in _RELAX if differs[name])
        level = max((_RELAX.index(name) + 1 for name in relaxed), default=0)
        found.append((max(level, 1) if level else 0, apart, lesson.losses - lesson.wins, lesson.id, lesson, relaxed))
    starts: list[WarmStart] = []
    for _, apart, _, _, lesson, relaxed in sorted(found, key=lambda f: f[:4]):
        if any(start.parameters == lesson.parameters for start in starts):
            continue
        what = f"relaxed: {', '.join(relaxed)}" if relaxed else "the very same key"
        note = f"tuned on {lesson.operator} {_spelled(lesson.axes)} ({apart:.2f} doublings away; {what})"
        starts.append(
            WarmStart(parameters=lesson.parameters, lesson_id=lesson.id, distance=apart, relaxed=relaxed, note=note)
        )
        if len(starts) == limit:
            break
    return tuple(starts)


def _spelled(axes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(axes.items()))


def seed(store: Store, *, folder: Any = None) -> int:
    """Write the knowledge that comes with Roofloop (`kb/seed/*.toml`); returns how many records it has.

    Doing it again changes nothing. Each entry names its source.

    Raises:
        InputError: a file has an unknown or missing key.
    """
    count = 0
    where = files("kb").joinpath("seed") if folder is None else folder
    for file in sorted((f for f in where.iterdir() if f.name.endswith(".toml")), key=lambda f: str(f.name)):
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
            records = [*(_seed_lesson(entry) for entry in data.get("lesson", ()))]
            rules = [Rule(id=content_hash(entry)[:24], **entry) for entry in data.get("rule", ())]
        except (tomllib.TOMLDecodeError, ValueError, TypeError, KeyError) as error:
            line = str(error).splitlines()[0]
            raise InputError(f"{line}.", remedy="Each [[lesson]] needs operator, lever, statement and source; each "
                             "[[rule]] text and origin.", file=file) from error  # fmt: skip
        for record in (*records, *rules):
            store.write(record)
            count += 1
    return count


def _seed_lesson(entry: Mapping[str, Any]) -> Lesson:
    axes = {str(k): int(v) for k, v in entry.get("axes", {}).items()}
    source = str(entry["source"])
    known = {"dtype": ANY, "target": ANY, "engine": ANY, "shape_class": shape_class(axes), **entry, "axes": axes}
    return Lesson(id=content_hash([known])[:24], **{**known, "source": source})
