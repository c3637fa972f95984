"""The memory: record files are the truth, one DuckDB is built from them, readers see snapshots.

Any number of processes write files. One at a time ingests (under a flock): it copies the newest database, adds the new
rows, and puts the copy in the newest one's place by renaming a link. The database in use is never changed, so a reader
is never shut out, and a process killed at any point leaves a stray copy and no half-done work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from kb import files, ledger
from kb.kinds import KINDS, SCHEMA_VERSION, Row, arrow, columns, schema_sql
from kb.records import Record
from kernels.errors import InputError

Params = Sequence[Any] | Mapping[str, Any] | None
_CLOSED: dict[str, Any] = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
# One and the same for every reader: DuckDB refuses a second connection of a process with other settings.
_READ = {
    **_CLOSED,
    "threads": 2,
    "memory_limit": "1GB",
    "enable_external_access": "false",
    "lock_configuration": "true",
}
_CHUNK = 20_000
_STALE_S = 3600.0


@dataclass(frozen=True)
class IngestReport:
    """What one ingest did."""

    added: int
    """Records that were new."""
    known: int
    """Records that the database had already."""
    set_aside: tuple[tuple[str, str], ...]
    """(path below `aside/`, why) of each file that could not be read."""
    head: str
    """Head of the ledger afterwards."""
    seconds: float


class Store:
    """The knowledge base of one workspace.

    Args:
        root: its folder (`.roofloop/kb`); made when first written to.
        threads: threads that an ingest may use.
    """

    def __init__(self, root: Path, *, threads: int = 2) -> None:
        self.root = root
        self._config: dict[str, Any] = {**_CLOSED, "threads": str(threads), "memory_limit": "1GB"}
        self._known: tuple[Path, int, int] | None = None
        """(snapshot, schema version, last ledger line) as last seen; a snapshot of one name never changes."""

    @property
    def database(self) -> Path:
        """Link to the newest snapshot."""
        return self.root / "memory.duckdb"

    # --- writing -------------------------------------------------------------------------------------------------
    def write(self, record: Record) -> Path:
        """Write one record as an immutable file and return its path. The first writer of an id wins.

        Raises:
            InputError: the disk is full or the folder cannot be written; nothing is half written.
        """
        return files.write(self.root, record)

    def write_many(self, records: Sequence[Record]) -> Path | None:
        """Write many records as one immutable file, for bulk; otherwise like `write`."""
        return files.write_many(self.root, records)

    def ingest(self) -> IngestReport:
        """Bring every file written since the last ingest into the database. Its cost grows with the new files only.

        A file that cannot be read is moved to `aside/` with the reason beside it; the rest is ingested.

        Raises:
            InputError: the disk is full, the folder cannot be written, or a file or the database is of a newer
                schema version. Nothing is lost: what was not ingested is ingested the next time.
        """
        start = time.monotonic()
        inbox = self.root / "inbox"
        with self._locked():
            self._sweep()
            version, last = self._state()
            if version is not None and version > SCHEMA_VERSION:
                raise self._newer(version)
            if version is not None and version < SCHEMA_VERSION:
                return self._build(start, files.every(self.root), fresh=True)
            entries = sorted(inbox.iterdir()) if inbox.is_dir() else []
            if not entries and version is not None and ledger.synced(self.root, last):
                return IngestReport(0, 0, (), ledger.head(self.root), time.monotonic() - start)
            set_aside: list[tuple[str, str]] = []
            paths = []
            for entry in entries:
                try:
                    paths.append(files.finish(self.root, entry))
                except files.BadFile as error:
                    set_aside.append(self._aside(entry, entry.name, str(error)))
            report = self._build(start, paths, fresh=version is None, set_aside=set_aside)
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    entry.unlink()
            return report

    def rebuild(self) -> IngestReport:
        """Throw the database away and build it from the files: the same rows, the same ledger head.

        Raises:
            InputError: as for `ingest`; the database in use stays.
        """
        start = time.monotonic()
        with self._locked():
            self._sweep()
            return self._build(start, files.every(self.root), fresh=True)

    # --- reading -------------------------------------------------------------------------------------------------
    def query(self, sql: str, params: Params = None) -> list[Row]:
        """Rows of the newest snapshot, as dicts. Only reads; no file outside the database can be reached from SQL.

        Raises:
            duckdb.Error: the SQL is wrong.
            InputError: the database is of another schema version.
        """
        with self.reader() as con:
            found = con.execute(sql, params or [])
            names = [column[0] for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    @contextlib.contextmanager
    def reader(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A read-only connection to the newest snapshot; an empty database where nothing was ingested yet."""
        con = self._open()
        try:
            yield con
        finally:
            con.close()

    def _open(self) -> duckdb.DuckDBPyConnection:
        for _ in range(20):
            if not self.database.is_symlink():
                con = duckdb.connect(":memory:", config=_READ)
                con.execute(schema_sql())
                return con
            path = self.database.resolve()
            try:
                con = duckdb.connect(str(path), read_only=True, config=_READ)
            except duckdb.IOException:
                if path.exists():
                    raise _damaged(path) from None
                continue  # a newer snapshot took its place between the two lines
            except duckdb.Error:
                raise _damaged(path) from None
            version = _version_of(con)
            if version != SCHEMA_VERSION:
                con.close()
                raise self._newer(version) if version > SCHEMA_VERSION else self._older(version)
            return con
        raise _damaged(self.database)

    # --- inside --------------------------------------------------------------------------------------------------
    def _build(
        self, start: float, paths: Any, *, fresh: bool, set_aside: list[tuple[str, str]] | None = None
    ) -> IngestReport:
        aside = set_aside or []
        try:
            number = 1 + max((_number(p) for p in self.root.glob("memory-*.duckdb")), default=0)
            building = self.root / f"building-{os.getpid()}.duckdb"
            if not fresh:
                shutil.copyfile(self.database.resolve(), building)
            con = duckdb.connect(str(building), config=self._config)
            try:
                if fresh:
                    con.execute(schema_sql())
                con.execute("BEGIN")
                if fresh:
                    con.execute("INSERT INTO meta VALUES ('schema_version', ?)", [str(SCHEMA_VERSION)])
                ledger.sync(self.root, con)
                added = known = 0
                for chunk in _chunks(paths, _CHUNK):
                    more, same = self._add(con, chunk, aside)
                    added, known = added + more, known + same
                con.execute("COMMIT")
                con.execute("CHECKPOINT")  # syncs the file
                last = ledger.last(con)
            finally:
                con.close()
            final = self.root / f"memory-{number:08d}.duckdb"
            building.rename(final)
            link = self.root / "memory.link"
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            link.rename(self.database)
            files.sync_folder(self.root)
            self._known = (self.database.resolve(), SCHEMA_VERSION, last)
            for old in self.root.glob("memory-*.duckdb"):
                if old != final:
                    old.unlink(missing_ok=True)
        except OSError as error:
            raise files.unwritable(self.root, error) from error
        except (duckdb.IOException, duckdb.OutOfMemoryException, duckdb.FatalException) as error:
            raise InputError(
                f"the database could not be written ({str(error).splitlines()[0][:200]}).",
                remedy="Make room on the disk, then run the same command (or roofloop kb rebuild): the files are kept.",
                file=self.root,
            ) from error
        return IngestReport(added, known, tuple(aside), ledger.head(self.root), time.monotonic() - start)

    def _add(self, con: duckdb.DuckDBPyConnection, paths: list[Path], aside: list[tuple[str, str]]) -> tuple[int, int]:
        found: dict[str, dict[str, files.Envelope]] = {}
        total = 0
        for path in paths:
            try:
                lines = path.read_bytes().split(b"\n")
            except FileNotFoundError:
                continue
            packed = path.suffix == ".jsonl"
            for number, line in enumerate(lines):
                if not line and (packed or number):
                    continue
                try:
                    envelope = files.unseal(line if packed else b"\n".join(lines).rstrip(b"\n"))
                    if not packed and envelope.id != path.stem:
                        raise files.BadFile(f"it holds the record {envelope.id}")
                except files.NewerFile as error:
                    raise InputError(error.problem, remedy=error.remedy, file=path) from None
                except files.BadFile as error:
                    name = f"{path.parent.parent.name}~{path.name}"
                    if packed:
                        aside.append(self._aside(line, f"{name}~{number}", str(error)))
                    else:
                        aside.append(self._aside(path, name, str(error)))
                else:
                    total += 1
                    found.setdefault(envelope.kind, {}).setdefault(envelope.id, envelope)
                if not packed:
                    break
        chained = [e for kind, batch in found.items() if KINDS[kind].chained for e in batch.values()]
        ledger.append(self.root, con, chained)
        added = 0
        for kind, batch in found.items():
            table = KINDS[kind].table
            rows = [row for e in batch.values() for row in KINDS[kind].rows(e.id, e.record, e.hash)]
            fresh = _insert(con, table, rows)
            owners = {row["id"].split("/")[0] for row in rows if row["id"] in fresh}
            added += len(owners)
        return added, total - added

    def _aside(self, what: Path | bytes, name: str, why: str) -> tuple[str, str]:
        folder = self.root / "aside"
        folder.mkdir(exist_ok=True)
        target = folder / name
        if isinstance(what, Path):
            what.rename(target)
        else:
            target.write_bytes(what)
        (folder / f"{name}.why").write_text(why + "\n", encoding="utf-8")
        return name, why

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise files.unwritable(self.root, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Remove what killed processes left: half-built databases, and temporary files old enough to be no one's."""
        for left in self.root.glob("building-*"):
            left.unlink(missing_ok=True)
        for left in (self.root / "tmp").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()

    def _state(self) -> tuple[int | None, int]:
        """Schema version and last ledger line of the newest snapshot; (None, 0) where there is none yet.

        Raises:
            InputError: it does not open.
        """
        if not self.database.is_symlink() or not self.database.exists():
            return None, 0
        path = self.database.resolve()
        if self._known is None or self._known[0] != path:
            try:
                with duckdb.connect(str(path), read_only=True, config=_READ) as con:
                    version = _version_of(con)
                    self._known = (path, version, ledger.last(con) if version == SCHEMA_VERSION else 0)
            except duckdb.Error:
                raise _damaged(path) from None
        return self._known[1:]

    def _newer(self, version: int) -> InputError:
        return InputError(
            f"the database has schema version {version}; this Roofloop knows {SCHEMA_VERSION}.",
            remedy="Upgrade Roofloop, or use another workspace.",
            file=self.database,
        )

    def _older(self, version: int) -> InputError:
        return InputError(
            f"the database has schema version {version}; this Roofloop needs {SCHEMA_VERSION}.",
            remedy="Run roofloop kb rebuild: it is built anew from the record files, which are kept.",
            file=self.database,
        )


def _insert(con: duckdb.DuckDBPyConnection, table: str, rows: list[Row]) -> set[str]:
    """Insert rows that are not there yet; returns the ids of those that were new."""
    con.register("incoming", arrow(table, rows))
    names = ", ".join(name for name, _ in columns(table))
    fresh = con.execute(
        f"INSERT INTO {table} ({names}) SELECT {names} FROM incoming ON CONFLICT DO NOTHING RETURNING id"
    ).fetchall()
    con.unregister("incoming")
    return {row[0] for row in fresh}


def _chunks(items: Any, size: int) -> Iterator[list[Path]]:
    batch: list[Path] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _version_of(con: duckdb.DuckDBPyConnection) -> int:
    found = con.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
    return int(found[0][0]) if found else 0


def _damaged(path: Path) -> InputError:
    return InputError(
        "the database does not open.",
        remedy="Run roofloop kb rebuild: it is built anew from the record files, which are kept.",
        file=path,
    )
