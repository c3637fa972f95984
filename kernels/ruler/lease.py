"""One device, one measurement: a lock that the kernel frees when its holder dies."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def host_leases() -> Path:
    """The folder of leases that all workspaces of this person share on this host."""
    return Path(tempfile.gettempdir()) / f"roofloop-{os.getuid()}"


@contextmanager
def device_lease(leases: Path, device: str) -> Iterator[Path]:
    """Hold `device` (`cpu`, `cuda:0`, …) for as long as the block runs; waits for its turn.

    A flock on a file in `leases`: no process can die holding it. Yields the file, which names the holder's pid.
    """
    leases.mkdir(parents=True, exist_ok=True)
    path = leases / (re.sub(r"[^A-Za-z0-9_.-]", "_", device) + ".lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield path
    finally:
        os.close(fd)
