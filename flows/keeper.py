"""The process that owns a workspace's Prefect server: it lives as long as any command uses the server.

Users hold a shared lock on a file; the kernel takes it from them however they die. Once nobody holds it, the keeper has
it for itself, stops the server, removes the record and ends. The server dies with its keeper (PDEATHSIG).

Run as `python -m flows.keeper STATE PORT COMMAND...`; standard library only, so that it weighs little.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
POLL_S = 0.3
STOP_S = 8.0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """TERM, then KILL, to the whole group."""
    for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def keep(record: Path, users: Path, command: list[str]) -> int:
    """Run the command until nobody holds `users`; returns its exit code when it ended by itself, else 0."""
    me = os.getpid()
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: die_with_parent(me),  # noqa: PLW1509
    )  # one thread here

    def leave(*_: object) -> None:
        stop_process(process)
        record.unlink(missing_ok=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which then lets go of its lock
    with users.open("a") as file:
        while process.poll() is None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
                continue
            # Nobody can begin to use the server while the lock is ours: whoever comes now waits, then starts another.
            stop_process(process)
            record.unlink(missing_ok=True)
            return 0
        return process.returncode


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
