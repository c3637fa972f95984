"""The ledger: a hash chain over the files of verdicts and end-to-end results.

Each ingest that brings new ones writes one batch file, `ledger/<first number>.json`, which fixes their order for good:
within a batch by time, kind and id. A rebuild reads the batches, so it comes to the same head. Line n's head is
SHA-256 of the previous head, the kind, the id and the hash of the record's file. Whoever holds a printed head can tell
later whether anything before it was changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from kb import files
from kb.kinds import KINDS, arrow, columns

if TYPE_CHECKING:
    from kb.store import Store

START = "0" * 64
"""Head of the empty ledger."""
_CHAINED = sorted(name for name, kind in KINDS.items() if kind.chained)


@dataclass(frozen=True)
class Fault:
    """One thing that is not as it was recorded."""

    number: int
    """Line of the ledger; 0 where the fault is not at a line."""
    kind: str
    id: str
    problem: str


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    lines: int
    head: str
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.faults


def link(previous: str, kind: str, ident: str, digest: str) -> str:
    """Head after one more line."""
    return hashlib.sha256(f"{previous}\n{kind}\n{ident}\n{digest}".encode()).hexdigest()


def append(root: Path, con: duckdb.DuckDBPyConnection, envelopes: Sequence[files.Envelope]) -> None:
    """Chain the envelopes that are not in the ledger yet: first as a batch file, then as rows of `con`."""
    if not envelopes:
        return
    wanted = [e.id for e in envelopes]
    rows = con.execute("SELECT kind, id FROM ledger WHERE id IN (SELECT unnest(?))", [wanted]).fetchall()
    known = {(kind, ident) for kind, ident in rows}
    fresh = [e for e in envelopes if (e.kind, e.id) not in known]
    if not fresh:
        return
    fresh.sort(key=lambda e: (e.record.get("at", ""), e.kind, e.id))
    newest = con.execute("SELECT number, head FROM ledger ORDER BY number DESC LIMIT 1").fetchall()
    number, head_now = newest[0] if newest else (0, START)
    lines = []
    for number_now, envelope in enumerate(fresh, start=number + 1):
        head_now = link(head_now, envelope.kind, envelope.id, envelope.hash)
        lines.append(
            {"number": number_now, "kind": envelope.kind, "id": envelope.id, "hash": envelope.hash, "head": head_now}
        )
    folder = root / "ledger"
    folder.mkdir(exist_ok=True)
    path = folder / f"{number + 1:012d}.json"
    temporary = folder / f".{path.name}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    files.sync_folder(folder)
    _insert(con, lines)


def sync(root: Path, con: duckdb.DuckDBPyConnection) -> None:
    """Bring batch files that the database lacks into it: all at a rebuild, else those of a killed ingest."""
    lines = [line for batch in _batches(root, last(con)) for line in batch]
    if lines:
        _insert(con, lines)


def synced(root: Path, last_line: int) -> bool:
    """Whether a database with lines up to `last_line` has every batch file: no ingest was killed between the two."""
    return not (root / "ledger" / f"{last_line + 1:012d}.json").exists()


def last(con: duckdb.DuckDBPyConnection) -> int:
    """Number of the database's last line; 0 when the ledger is empty."""
    return int(con.execute("SELECT coalesce(max(number), 0) FROM ledger").fetchall()[0][0])


def head(root: Path) -> str:
    """Head of the ledger by its files; `START` when it is empty."""
    folder = root / "ledger"
    newest = max((p.name for p in folder.glob("[0-9]*.json")), default=None) if folder.is_dir() else None
    return START if newest is None else str(json.loads((folder / newest).read_text(encoding="utf-8"))[-1]["head"])


def _batches(root: Path, after: int) -> Iterator[list[dict[str, Any]]]:
    folder = root / "ledger"
    for path in sorted(folder.glob("[0-9]*.json")) if folder.is_dir() else ():
        if int(path.stem) > after:
            yield json.loads(path.read_text(encoding="utf-8"))


def _insert(con: duckdb.DuckDBPyConnection, lines: list[dict[str, Any]]) -> None:
    con.register("incoming", arrow("ledger", lines))
    con.execute("INSERT INTO ledger SELECT * FROM incoming ON CONFLICT DO NOTHING")
    con.unregister("incoming")


def verify(store: Store, *, head: str | None = None) -> Verification:
    """Check the ledger against itself, against the record files and against the rows of the database.

    Names each line that was edited or moved, each file that was edited or is missing, and each row of `verdicts` and
    `end_to_end` that differs from its file, is missing, or has no file.

    Args:
        store: the knowledge base.
        head: a head noted earlier (every report prints it); it must occur in the ledger, or lines were cut off.
    """
    root = store.root
    faults: list[Fault] = []
    lines: list[dict[str, Any]] = []
    try:
        lines = [line for batch in _batches(root, 0) for line in batch]
    except (ValueError, OSError) as error:
        faults.append(Fault(0, "ledger", "", f"a batch file cannot be read: {error}"))
    previous = START
    for expected, line in enumerate(lines, start=1):
        if line["number"] != expected:
            faults.append(Fault(expected, line["kind"], line["id"], f"line {expected} is missing or out of order"))
            break
        if link(previous, line["kind"], line["id"], line["hash"]) != line["head"]:
            faults.append(
                Fault(expected, line["kind"], line["id"], "the line was edited or moved: the chain breaks here")
            )
        previous = line["head"]
    if head is not None and head != START and head not in {line["head"] for line in lines}:
        faults.append(Fault(0, "ledger", "", f"the head {head} does not occur: lines were cut off or replaced"))
    held, bad = _held(root, lines)
    faults += bad
    with store.reader() as con:
        rows = con.execute("SELECT number, kind, id, hash, head FROM ledger ORDER BY number").fetchall()
        ours = {
            line["number"]: (line["number"], line["kind"], line["id"], line["hash"], line["head"]) for line in lines
        }
        for row in rows:
            if ours.pop(row[0], None) != row:
                faults.append(Fault(row[0], row[1], row[2], "the database's ledger has this line, the files do not"))
        faults += [Fault(n, line[1], line[2], "the line is not in the database") for n, line in ours.items()]
        for kind in _CHAINED:
            faults += _rows_that_differ(con, kind, held)
    return Verification(len(lines), previous, tuple(faults))


def _held(root: Path, lines: list[dict[str, Any]]) -> tuple[dict[tuple[str, str], files.Envelope], list[Fault]]:
    """The record behind each line, and a fault for each that is missing or was edited."""
    held: dict[tuple[str, str], files.Envelope] = {}
    faults, packed = [], None
    for line in lines:
        key = (line["kind"], line["id"])
        path = files.place(root, *key)
        try:
            if path.exists():
                envelope = files.unseal(path.read_bytes().rstrip(b"\n"))
            else:
                packed = _packed(root) if packed is None else packed
                envelope = packed[key]
            if envelope.hash != line["hash"] or envelope.id != line["id"]:
                raise files.BadFile("its content was replaced")
            held[key] = envelope
        except KeyError:
            faults.append(Fault(line["number"], *key, "its file is missing"))
        except (files.BadFile, files.NewerFile) as error:
            faults.append(Fault(line["number"], *key, f"its file was edited or damaged: {error}"))
    return held, faults


def _packed(root: Path) -> dict[tuple[str, str], files.Envelope]:
    found: dict[tuple[str, str], files.Envelope] = {}
    for path in (root / "packs").glob("*/*.jsonl"):
        for line in path.read_bytes().split(b"\n"):
            try:
                envelope = files.unseal(line)
            except (files.BadFile, files.NewerFile):
                continue
            if envelope.kind in _CHAINED:
                found[envelope.kind, envelope.id] = envelope
    return found


def _rows_that_differ(
    con: duckdb.DuckDBPyConnection, kind: str, held: dict[tuple[str, str], files.Envelope]
) -> list[Fault]:
    table = KINDS[kind].table
    ours = [row for (k, _), e in held.items() if k == kind for row in KINDS[kind].rows(e.id, e.record, e.hash)]
    con.register("held", arrow(table, ours))
    names = ", ".join(f"CAST({name} AS VARCHAR)" if dtype == "JSON" else name for name, dtype in columns(table))
    query = "SELECT DISTINCT id FROM (SELECT {n} FROM {a} EXCEPT SELECT {n} FROM {b}) ORDER BY id"
    found: list[Fault] = []
    for left, right, problem in (
        (table, "held", "its row in the database does not match its file"),
        ("held", table, "its row is missing from the database, or differs"),
    ):
        ids = [row[0] for row in con.execute(query.format(n=names, a=left, b=right)).fetchall()]
        known = {fault.id for fault in found}
        found += [Fault(0, kind, ident, problem) for ident in ids if ident not in known]
    con.unregister("held")
    return found
