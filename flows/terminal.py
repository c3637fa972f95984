"""What a person sees in the terminal: the stage, the best so far, the budget left; everything else goes to a log.

The file descriptors 1 and 2 of the process are pointed at the log, so that no library, child process or traceback
writes over the display or into the JSON document.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tasks.run_state import Clock


@dataclass(frozen=True)
class Streams:
    """The real standard output and error, kept while 1 and 2 point at the log."""

    out: TextIO
    err: TextIO
    log: Path


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[Streams]:
    """Point file descriptors 1 and 2 at `log` (appended to); yields the real ones."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]  # not inheritable: children only know the log
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    streams = Streams(
        os.fdopen(os.dup(kept[0]), "w", encoding="utf-8"), os.fdopen(os.dup(kept[1]), "w", encoding="utf-8"), log
    )
    try:
        yield streams
    finally:
        for stream in (sys.stdout, sys.stderr, streams.out, streams.err):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number, fd in zip((1, 2), kept, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        with contextlib.suppress(OSError):
            streams.out.close()
            streams.err.close()


def duration(seconds: float) -> str:
    """`3.2 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class Display:
    """Progress of one run. Thread-safe; silent when there is no stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream, highlight=False) if stream else None
        self._lock = threading.Lock()
        self._titles: list[str] = []
        self._detail = ""
        self._best = ""
        self._clock: Clock | None = None
        self._live: Live | None = None
        self._since = time.monotonic()

    @contextlib.contextmanager
    def shown(self) -> Iterator[Display]:
        """Show the live view on a terminal; elsewhere only plain lines are printed."""
        token = _CURRENT.set(self)
        live = self._console is not None and self._console.is_terminal
        self._live = Live(self, console=self._console, refresh_per_second=1, transient=True) if live else None
        try:
            with self._live or contextlib.nullcontext():
                yield self
        finally:
            self._live = None
            _CURRENT.reset(token)

    def clock(self, clock: Clock) -> None:
        """Show this clock's budget."""
        self._clock = clock

    def begin(self, title: str) -> None:
        """A stage has begun."""
        with self._lock:
            self._titles.append(title)
            self._detail = ""
            self._since = time.monotonic()

    def end(self, title: str, said: str = "", seconds: float | None = None) -> None:
        """A stage has ended: one line stays."""
        with self._lock:
            if title in self._titles:
                self._titles.remove(title)
            self._detail = ""
        took = "" if seconds is None else f" ({duration(seconds)})"
        self.say(f"{title}{': ' if said else ''}{said}{took}")

    def detail(self, text: str) -> None:
        """What the stage is at; shown live only."""
        self._detail = text

    def best(self, text: str) -> None:
        """The best so far."""
        self._best = text

    def say(self, line: str) -> None:
        """One line that stays."""
        if self._console is not None:
            self._console.print(Text(line), soft_wrap=True)

    @property
    def stage(self) -> str:
        """Title of the stage that is being worked on, empty between stages."""
        return self._titles[-1] if self._titles else ""

    @property
    def best_text(self) -> str:
        """The best so far, as shown."""
        return self._best

    def __rich__(self) -> Table:
        """The live view."""
        view = Table.grid(padding=(0, 1))
        elapsed = duration(time.monotonic() - self._since)
        what = " · ".join(self._titles[-2:]) or "working"
        view.add_row(Spinner("dots"), Text(f"{what} · {elapsed}{' · ' if self._detail else ''}{self._detail}"))
        if self._best:
            view.add_row("", Text(f"best so far: {self._best}", style="green"))
        if self._clock is not None:
            left, whole = max(0.0, self._clock.left_s()), self._clock.budget_s
            bar = "━" * round(30 * left / whole) if whole else ""
            view.add_row("", Text(f"budget left: {duration(left)} of {duration(whole)} {bar}", style="dim"))
        return view


_CURRENT: contextvars.ContextVar[Display | None] = contextvars.ContextVar("display", default=None)


def current() -> Display:
    """The display of this run; silent when there is none. Threads of Prefect's runners see their flow's."""
    return _CURRENT.get() or Display()
