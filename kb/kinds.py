"""Which record goes to which table, under which id, as which rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import duckdb
import pyarrow as pa

from kb import records as r
from kernels.identity import canonical_json, content_hash

SCHEMA_VERSION = 1
"""Of files and tables. Raise it with every change of either, and add a step to `MIGRATIONS`."""

MIGRATIONS: dict[int, Callable[[str, dict[str, Any]], dict[str, Any]]] = {}
"""By the version that a file has: (kind, record as JSON) → the record as the next version has it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of record file."""

    name: str
    """Folder of its files."""
    record: type[r.Record]
    identify: Callable[[Any], str]
    """The id. A natural one (a campaign's outcome has the campaign's id) makes writing it twice count once."""
    rows: Callable[[str, Row, str], Iterator[Row]]
    """(id, record as JSON, content hash) → rows."""
    table: str
    chained: bool = False
    """Whether its files are links of the ledger."""


def _plain(ident: str, data: Row, digest: str) -> Iterator[Row]:
    data = {**data, **data.get("provenance", {})}
    yield {**data, "id": ident, "hash": digest}


def _profile_rows(ident: str, data: Row, digest: str) -> Iterator[Row]:
    head = {**data, **data["provenance"], "profile_id": ident}
    for number, row in enumerate(data["rows"]):
        yield {**head, **row, "id": f"{ident}/{number:04d}"}


def _verdict_row(ident: str, data: Row, digest: str) -> Iterator[Row]:
    verdict = data["verdict"]
    speedup = verdict.get("speedup") or {}
    named = {k: verdict.get(k) for k in ("status", "law", "reason", "claim", "floor_fraction", "duration_s")}
    interval = {"speedup": speedup.get("estimate"), "low": speedup.get("low"), "high": speedup.get("high")}
    yield {**data, **named, **interval, "id": ident, "hash": digest}


def _event_row(ident: str, data: Row, digest: str) -> Iterator[Row]:
    yield {**data, "id": ident, "event": "status"}


def _score_rows(ident: str, data: Row, digest: str) -> Iterator[Row]:
    same = {"run_id": data["run_id"], "cause": data["cause"]}
    for idea, parts in data["scores"].items():
        out = idea in data["excluded"]
        why = data["excluded"].get(idea, parts["why"])
        event = "excluded" if out else "score"
        yield {**parts, **same, "id": f"{ident}/{idea}", "idea_id": idea, "event": event, "reason": why}


def _by_id(record: Any) -> str:
    return str(record.id)


def _outcome_id(o: r.Outcome) -> str:
    return f"{o.campaign_id}-failed-{o.content_hash[:12]}" if o.conclusion == "failed" else o.campaign_id


def _evidence_id(e: r.Evidence) -> str:
    return content_hash([e.subject, e.subject_id, e.effect, e.because])[:24]


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("profiles", r.Profile, _by_id, _profile_rows, "profiles"),
        Kind("trials", r.Trial, lambda t: f"{t.run_id}-{t.number:04d}-{t.content_hash[:12]}", _plain, "trials"),
        Kind("verdicts", r.VerdictFile, _by_id, _verdict_row, "verdicts", chained=True),
        Kind("ideas", r.Idea, _by_id, _plain, "ideas"),
        Kind("idea_events", r.IdeaEvent, lambda e: f"{e.idea_id}-{e.number:04d}", _event_row, "idea_events"),
        Kind("rescores", r.Rescore, _by_id, _score_rows, "idea_events"),
        Kind("campaigns", r.Campaign, _by_id, _plain, "campaigns"),
        Kind(
            "attempts", r.Attempt, lambda a: f"{a.campaign_id}-{a.number:05d}-{a.content_hash[:12]}", _plain, "attempts"
        ),
        Kind("outcomes", r.Outcome, _outcome_id, _plain, "outcomes"),
        Kind("end_to_end", r.EndToEnd, _by_id, _plain, "end_to_end", chained=True),
        Kind("lessons", r.Lesson, _by_id, _plain, "lessons"),
        Kind("evidence", r.Evidence, _evidence_id, _plain, "evidence"),
        Kind("rules", r.Rule, _by_id, _plain, "rules"),
        Kind("crash_sets", r.CrashSet, _by_id, _plain, "crash_sets"),
        Kind("scopes", r.Scope, _by_id, _plain, "scopes"),
        Kind("claims", r.Claim, lambda c: f"{c.subject}-{c.content_hash[:12]}", _plain, "claims"),
    )
}
_BY_RECORD = {kind.record: kind for kind in KINDS.values()}


def kind_of(record: r.Record) -> Kind:
    """The kind of a record.

    Raises:
        TypeError: records of this class are not kept.
    """
    try:
        return _BY_RECORD[type(record)]
    except KeyError:
        raise TypeError(f"{type(record).__name__} has no table") from None


@cache
def schema_sql() -> str:
    """schema.sql, with COMMENT ON statements made of the words behind `--`."""
    text = files("kb").joinpath("schema.sql").read_text(encoding="utf-8")
    # One transaction: a comment each in its own would cost a sync each.
    statements = ["BEGIN;", text]
    table = ""
    for line in text.splitlines():
        if found := re.match(r"CREATE (TABLE|VIEW) (\w+).*? -- (.+)", line):
            table = found[2]
            statements.append(f"COMMENT ON {found[1]} {table} IS '{_quoted(found[3])}';")
        elif found := re.match(r"  (\w+) [A-Z]+\b[^-]*-- (.+)", line):
            statements.append(f"COMMENT ON COLUMN {table}.{found[1]} IS '{_quoted(found[2])}';")
    return "\n".join([*statements, "COMMIT;"])


def _quoted(words: str) -> str:
    return words.replace("'", "''")


_ARROW = {
    "VARCHAR": pa.string(), "JSON": pa.string(), "DOUBLE": pa.float64(), "INTEGER": pa.int32(), "BIGINT": pa.int64()
}  # fmt: skip


@cache
def columns(table: str) -> tuple[tuple[str, str], ...]:
    """(name, DuckDB type) of each column of a table, from schema.sql."""
    with duckdb.connect(":memory:", config={"threads": 1}) as con:
        con.execute(schema_sql())
        query = "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = ? ORDER BY column_index"
        return tuple((str(a), str(b)) for a, b in con.execute(query, [table]).fetchall())


def arrow(table: str, rows: list[Row]) -> pa.Table:
    """Rows as an Arrow table with the table's columns; keys without a column are left out, missing ones are null."""
    arrays, fields = [], []
    for name, kind in columns(table):
        key = "at" if name == "at_utc" else name
        values = [row.get(key) for row in rows]
        if kind == "JSON":
            values = [None if value is None else canonical_json(value) for value in values]
        arrays.append(pa.array(values, type=_ARROW[kind]))
        fields.append(pa.field(name, _ARROW[kind]))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))
