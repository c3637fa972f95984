"""Record files: written once, whole or not at all, with their own hash inside, never changed.

A record lies at `<kind>/<shard>/<id>.json`; many at once lie as lines of `packs/<shard>/<hash>.jsonl`. Until it is
ingested, a file has a second name (hard link) in `inbox/`, so that an ingest looks at new files only. The inbox name
comes first: a file that has its final name is sure to be ingested.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from kb.kinds import KINDS, MIGRATIONS, SCHEMA_VERSION, kind_of
from kb.records import Record
from kernels.errors import InputError
from kernels.identity import canonical_json

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}")


class Envelope(NamedTuple):
    """What one record file holds."""

    kind: str
    id: str
    hash: str
    record: dict[str, Any]


class BadFile(ValueError):
    """A record file that cannot be read: cut off, edited, or of an unknown kind."""


class NewerFile(InputError):
    """A record file that a newer Roofloop wrote."""


def digest(kind: str, version: int, record_json: str) -> str:
    """Content hash of a record file: SHA-256 over kind, schema version and the record's canonical JSON."""
    return hashlib.sha256(f"{kind}\n{version}\n{record_json}".encode()).hexdigest()


def seal(record: Record) -> tuple[str, str, bytes]:
    """(kind, id, one line of JSON without the newline) of a record.

    Raises:
        ValueError: the record's id cannot be a file name.
    """
    kind = kind_of(record)
    ident = kind.identify(record)
    if not _SAFE.fullmatch(ident):
        raise ValueError(f"{kind.name}: the id {ident!r} is not letters, digits, dots, dashes and underscores")
    body = canonical_json(record.model_dump(mode="json"))
    head = f'{{"hash":"{digest(kind.name, SCHEMA_VERSION, body)}","kind":"{kind.name}","record":'
    return kind.name, ident, f'{head}{body},"schema_version":{SCHEMA_VERSION}}}'.encode()


def unseal(line: bytes) -> Envelope:
    """Read one record back, checking its hash, migrating it where it is of an older version.

    Raises:
        BadFile: not a whole, unchanged record of a known kind.
        NewerFile: written under a newer schema version.
    """
    try:
        data = from_json(line)
        kind, version, claimed, record = data["kind"], data["schema_version"], data["hash"], data["record"]
    except (ValueError, KeyError, TypeError):
        raise BadFile("it is not a whole record file") from None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise NewerFile(
            f"has schema version {version}; this Roofloop knows {SCHEMA_VERSION}.",
            remedy="Upgrade Roofloop, or use another workspace.",
        )
    if kind not in KINDS or not isinstance(version, int):
        raise BadFile(f"its kind {kind!r} is unknown")
    # The file is written canonically, so the record's own bytes are what was hashed; a reformatted file is read anew.
    start, end = line.find(b'"record":') + 9, line.rfind(b',"schema_version"')
    if digest(kind, version, line[start:end].decode(errors="replace")) != claimed:
        with suppress(ValueError):
            if digest(kind, version, canonical_json(record)) == claimed:
                claimed = str(claimed)
                return _checked(kind, version, claimed, record)
        raise BadFile("its content does not match its hash: it was edited or damaged")
    return _checked(kind, version, claimed, record)


def _checked(kind: str, version: int, claimed: str, record: dict[str, Any]) -> Envelope:
    for step in range(version, SCHEMA_VERSION):
        record = MIGRATIONS[step](kind, record)
    try:
        parsed = KINDS[kind].record.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadFile(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return Envelope(kind, KINDS[kind].identify(parsed), claimed, record)


def place(root: Path, kind: str, ident: str) -> Path:
    """Where a record's file lies."""
    return root / kind / hashlib.sha256(ident.encode()).hexdigest()[:2] / f"{ident}.json"


def write(root: Path, record: Record) -> Path:
    """Write one record for good. Whoever writes an id first wins: a second record of the same id changes nothing.

    Raises:
        InputError: the disk is full, or the folder cannot be written. Nothing is half written.
    """
    kind, ident, line = seal(record)
    path = place(root, kind, ident)
    if not path.exists():
        _publish(root, path, f"{kind}~{ident}.json", line + b"\n")
    return path


def write_many(root: Path, records: Iterable[Record]) -> Path | None:
    """Write many records as one file, for a bulk of rows that are made at once. None where there are none.

    Raises:
        InputError: as for `write`; then none of them is written.
    """
    lines = b"".join(seal(record)[2] + b"\n" for record in records)
    if not lines:
        return None
    name = hashlib.sha256(lines).hexdigest()
    path = root / "packs" / name[:2] / f"{name}.jsonl"
    if not path.exists():
        _publish(root, path, f"packs~{name}.jsonl", lines)
    return path


def _publish(root: Path, path: Path, inbox_name: str, content: bytes) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (root / "inbox").mkdir(exist_ok=True)
        (root / "tmp").mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=root / "tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, root / "inbox" / inbox_name)
        with suppress(FileExistsError):
            os.link(temporary, path)
        sync_folder(root / "inbox")
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def finish(root: Path, entry: Path) -> Path:
    """Give an inbox entry its final name, where a crash came between the two; returns the final path."""
    kind, _, name = entry.name.partition("~")
    if kind == "packs":
        path = root / "packs" / name[:2] / name
    elif kind in KINDS:
        path = place(root, kind, name.removesuffix(".json"))
    else:
        raise BadFile("its name is not that of a record file")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.link(entry, path)
    return path


def every(root: Path) -> Iterator[Path]:
    """All record files and packs, in the order of their names."""
    for folder in ("packs", *sorted(KINDS)):
        for shard in sorted((root / folder).glob("*")) if (root / folder).is_dir() else ():
            yield from sorted(shard.glob("*.json*"))


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> InputError:
    """The message for a disk or folder that does not take what is written."""
    return InputError(
        f"cannot be written ({error.strerror}).",
        remedy="Make room on the disk or make the folder writable, then run the same command: nothing is lost.",
        file=path,
    )
