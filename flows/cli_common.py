"""What all commands share: options, the workspace, standard output, and how failures reach a person."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import datetime
import errno
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from kernels.errors import InputError

if TYPE_CHECKING:
    from flows.terminal import Display, Streams
    from tasks.run_state import RunState
    from tasks.workspace import Workspace

HERE = Path()
UNBOUNDED = 1e6
"""An interval of a speed-up that reaches this far says nothing: there were too few rounds."""
_LOGS: contextvars.ContextVar[Path | None] = contextvars.ContextVar("logs", default=None)
"""Folder of logs of the workspace that this command opened; a contextvar, so that a failure before that has none."""


def _chosen(context: typer.Context, value: Path | None) -> Path:
    """The command's own --workspace, else the one before the command, else the current folder."""
    return value or context.find_root().params.get("workspace") or HERE


WorkspaceOption = Annotated[
    Path,
    typer.Option(
        "--workspace", help="Folder that holds runs/ and .roofloop/.", show_default="this folder", callback=_chosen
    ),
]
"""Declared with the default None; what a command receives is always a path."""
UNSET: Any = None
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, nothing else.")]
RunArgument = Annotated[str, typer.Argument(help="A run's id; the newest when not given.")]


class RunFailed(Exception):
    """The run failed: exit code 1, with a message that is enough."""


def open_workspace(root: Path) -> Workspace:
    """The workspace in that folder, its folders made."""
    from tasks.workspace import Workspace

    place = Workspace(root).create()
    _LOGS.set(place.logs)
    return place


def find_run(place: Workspace, run_id: str) -> RunState:
    """The run with that id, the newest when it is empty.

    Raises:
        InputError: there is none.
    """
    from tasks.run_state import list_runs

    found = list_runs(place.runs, lambda record: run_id in ("", record.run_id))
    if not found:
        what = f"there is no run {run_id!r}." if run_id else "there are no runs yet."
        raise InputError(what, file=place.runs, remedy="List the runs with `roofloop status`.")
    return found[0]


@contextlib.contextmanager
def quiet(place: Workspace, name: str) -> Iterator[Streams]:
    """Send what libraries and children print to the log of this command; yields the real streams."""
    from flows import terminal

    with terminal.quiet(place.logs / f"{name}.log") as streams:
        yield streams


@contextlib.contextmanager
def served(place: Workspace, streams: Streams, display: Display) -> Iterator[str]:
    """Use a Prefect server; yields the URL of its UI.

    Raises:
        RunFailed: it could not be started.
    """
    from flows import server

    try:
        with server.serving(place, display.say) as running:
            yield running.ui_url
    except server.ServerFailed as error:
        raise RunFailed(f"{error}. See also {streams.log}.") from error


def complain(text: str) -> None:
    """One line on standard error."""
    print(f"roofloop: {text}", file=sys.stderr)


def exit_code(error: Exception) -> int:
    """Tell a person what failed, never with a traceback; gives the exit code."""
    if isinstance(error, InputError):
        complain(str(error))
        return 2
    if isinstance(error, RunFailed):
        complain(str(error))
        return 1
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # the usage errors of typer
        error.show()
        return 2
    if isinstance(error, BrokenPipeError):  # `roofloop status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        where = f"{error.filename}: " if error.filename else ""
        complain(
            f"{where}{os.strerror(error.errno)}. Free some space, or name another folder with --workspace; what was "
            "finished is kept."
        )
        return 2
    lines = str(error).strip().splitlines() or ["no message"]
    said = lines[-1] if "Traceback" in lines[0] else lines[0]  # of a child's traceback, the last line says it
    complain(f"{type(error).__name__}: {said}{_logged(error)}")
    return 1


def _logged(error: Exception) -> str:
    log = (_LOGS.get() or Path(tempfile.gettempdir())) / f"error-{os.getpid()}.log"
    try:
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return ""
    return f"; the details are in {log}"


def plain(value: Any) -> Any:
    """The value in JSON's own types: records as objects, times as ISO 8601, NaN and infinities as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(held) for held in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime.date):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def print_json(document: Any, out: TextIO | None = None) -> None:
    """One document on standard output."""
    stream = out or sys.stdout
    json.dump(plain(document), stream, indent=1, ensure_ascii=False, allow_nan=False)
    stream.write("\n")
    stream.flush()


def words(value: Any) -> str:
    """A value in a table or a sentence."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words(held)}" for key, held in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(words(held) for held in value) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show(rows: Sequence[Mapping[str, Any]], as_json: bool, *, empty: str = "Nothing.") -> None:
    """Rows as a table, or as a JSON list."""
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(empty)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Columns that are empty all over only take room.
    keys = [key for key in rows[0] if any(words(row.get(key)) for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key in keys:
        table.add_column(str(key).replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(words(row.get(key))) for key in keys))
    wide = None if sys.stdout.isatty() else 200  # a file or a pipe has no width
    Console(width=wide).print(table)
