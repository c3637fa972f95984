"""A freezer and a pids limit from the kernel's control groups; made and removed by the trusted side."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

PREFIX = "roofloop."


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _cgroup_mounts() -> dict[str, Path]:
    """Writable folders of the cgroup hierarchies that help: `v2` (freezer) and `pids` (either version)."""
    found: dict[str, Path] = {}
    try:
        own = {line.split(":", 2)[1]: line.split(":", 2)[2].strip() for line in _lines("/proc/self/cgroup")}
        for line in _lines("/proc/mounts"):
            _, where, kind, options, *_ = line.split()
            if kind == "cgroup2":
                found["v2"] = Path(where + own.get("", "/").rstrip("/"))
            elif kind == "cgroup" and "pids" in options.split(","):
                found["pids"] = Path(where + own.get("pids", "/").rstrip("/"))
    except OSError:
        return {}
    return {kind: path for kind, path in found.items() if os.access(path / "cgroup.procs", os.W_OK)}


class Cgroup:
    """A freezer and a pids limit for one worker; each falls away where the machine does not have it."""

    def __init__(self, name: str, pids: int) -> None:
        self.folders: list[Path] = []
        self.freezer: int | None = None
        self.events: int | None = None
        self.usage: int | None = None
        self.lacking: list[str] = []
        limited = False
        for kind, parent in _cgroup_mounts().items():
            folder = parent / f"{PREFIX}{os.getpid()}.{name}"
            try:
                folder.mkdir()
                self.folders.append(folder)
                if (folder / "pids.max").exists():
                    (folder / "pids.max").write_text(str(pids))
                    limited = True
                if kind == "v2":
                    self.events = os.open(folder / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
                    self.usage = os.open(folder / "cpu.stat", os.O_RDONLY | os.O_CLOEXEC)
                    self.freezer = os.open(folder / "cgroup.freeze", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                self.lacking.append(f"cgroup {kind}: {error.strerror}")
        if not limited:
            self.lacking.append("pids limit")
        if self.freezer is None:
            self.lacking.append("cgroup freezer")

    def add(self, pid: int) -> None:
        """Put a process in."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def freeze(self, on: bool) -> None:
        """Freeze (and wait until nothing runs) or thaw."""
        assert self.freezer is not None
        assert self.events is not None
        os.pwrite(self.freezer, b"1" if on else b"0", 0)
        end = time.monotonic() + 10
        while on and b"frozen 1" not in os.pread(self.events, 64, 0):
            os.sched_yield()  # it may share our core (and priority), and must run to stop
            if time.monotonic() > end:
                raise RuntimeError("a worker could not be frozen")

    def remove(self) -> None:
        """Kill what is left in it and take it away."""
        for fd in (self.freezer, self.events, self.usage):
            if fd is not None:
                os.close(fd)
        self.freezer = self.events = self.usage = None
        for folder in self.folders:
            remove(folder)
        self.folders = []


def remove(folder: Path, patience_s: float = 2.0) -> None:
    """Kill all members of a cgroup and remove it; gives up silently after `patience_s`."""
    end = time.monotonic() + patience_s
    while folder.exists() and time.monotonic() < end:
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            folder.rmdir()
            return
        time.sleep(0.002)


def sweep(ended: int | None = None) -> int:
    """Remove the cgroups of a ruler that is known to have ended, or of all that are gone; returns how many."""
    swept = 0
    for parent in _cgroup_mounts().values():
        for folder in parent.glob(f"{PREFIX}*"):
            owner = folder.name.split(".")[1]
            if owner == str(ended) or (owner.isdigit() and not Path(f"/proc/{owner}").exists()):
                remove(folder)
                swept += 1
    return swept
