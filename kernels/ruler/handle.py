"""The ruler's end of a worker: start it, put the clock around it, freeze it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from kernels.ruler import cgroup, sandbox, worker
from kernels.ruler.inputs import DeviceMemory, Layout, Memory, allocate

_numbers = count()
# The allocator's sliding thresholds make the same operator take 0.2 or 2 ms in fresh processes: pinned, on both sides.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "67108864",
}  # fmt: skip


class WorkerFailed(Exception):
    """A worker did not answer a call as it should; `status` is a verdict's, `law` is set for `void`."""

    def __init__(self, status: str, reason: str, law: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.law = status, reason, law


class Template:
    """A process that has imported torch and forks workers; one for each thread count."""

    def __init__(self, threads: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **ALLOCATOR, "PATH": os.defpath, "HOME": "/tmp", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0",
        }  # fmt: skip
        self.environment, self.threads, self.channel = environment, threads, ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", worker.__file__, str(theirs.fileno()), str(threads)],
                env=environment, pass_fds=[theirs.fileno()], start_new_session=True, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        ours.settimeout(120)
        try:
            self.alive = ours.recv(16) == b"ready"
        except OSError:
            self.alive = False
        if not self.alive:
            self.close()
            raise RuntimeError("the ruler's template process could not start (does `import torch` work?)")

    def close(self) -> None:
        """End it; its workers end with their rulers."""
        self.channel.close()
        self.process.kill()
        self.process.wait()
        self.alive = False


def cores(threads: int) -> list[int]:
    """Cores of the workers: the machine's last ones (empty where that cannot be said)."""
    return list(range(os.cpu_count() or 1))[-threads:] if hasattr(os, "sched_setaffinity") else []


def visible_paths() -> tuple[str, ...]:
    """What a worker needs to see of this Python installation."""
    paths = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)}
    return tuple(sorted(p for p in paths if not p.startswith("/usr/") and p != "/usr"))


class Worker:
    """One worker process, frozen except while a call is in progress."""

    def __init__(  # noqa: PLR0917
        self, template: Template, inputs: Memory | DeviceMemory, output_bytes: int, policy: sandbox.Policy,
        extra: dict[str, str], device: str = "cpu",
    ) -> None:  # fmt: skip
        self.outputs = allocate(output_bytes, sealed=False, device=device)
        self.name = str(next(_numbers))
        self.group = cgroup.Cgroup(self.name, policy.pids) if policy.level == "full" else None
        self.pid: int | None = None
        self.exit_code: int | None = None
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(5)]
        (go_r, self.go), (self.reply, reply_w), (self.log, log_w), (life_r, self.life), (self.report, report_w) = ends
        os.set_blocking(log_w, False)
        os.set_blocking(self.log, False)
        request = {
            "policy": asdict(policy), "groups": [str(f) for f in self.group.folders] if self.group else [],
            "env": {**template.environment, "TMPDIR": "/tmp", **extra},
            "input_bytes": inputs.size, "output_bytes": self.outputs.size,
            "tickets": [inputs.ticket, self.outputs.ticket],
        }  # fmt: skip
        theirs = [go_r, reply_w, log_w, inputs.fd, self.outputs.fd, life_r, report_w]
        socket.send_fds(template.channel, [json.dumps(request).encode()], theirs)
        for fd in (go_r, reply_w, log_w, life_r, report_w):
            os.close(fd)
        lines = os.read(self.report, 64)
        if not lines:
            raise RuntimeError("a worker could not be started")
        self.pid = int(lines.split()[0])
        self._await(time.monotonic() + 30)
        self.lacking: list[str] = json.loads(self.said() or "[]")
        if self.group is not None:
            self.lacking += self.group.lacking
        self._freeze(True)

    def said(self) -> str:
        """What the worker wrote to its log since last asked; untrusted text."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.log, 8192).decode(errors="replace")
        return ""

    def send(self, kind: int, body: dict[str, Any], timeout_s: float) -> float:
        """A command with a body (load, configure, prepare); returns seconds. Raises WorkerFailed."""
        text = json.dumps(body).encode()
        return self._exchange(worker.HEADER.pack(kind, 0, 0, len(text)) + text, timeout_s)

    def run(self, which: int, first: int, calls: int, timeout_s: float) -> float:
        """Run function `which` on `calls` slots from `first`; returns the seconds from thaw to frozen again.

        Raises:
            WorkerFailed: it crashed, hung, ran out of memory, raised, or spoke out of turn.
        """
        return self._exchange(worker.HEADER.pack(worker.RUN, which, first, calls), timeout_s)

    def cpu_s(self) -> tuple[float, float]:
        """Seconds that its threads have run, and have waited for a core, so far (0 where the kernel does not say)."""
        ran = waited = 0
        try:
            for task in os.listdir(f"/proc/{self.pid}/task"):
                with open(f"/proc/{self.pid}/task/{task}/schedstat", "rb") as file:
                    figures = file.read().split()
                ran, waited = ran + int(figures[0]), waited + int(figures[1])
            if self.group is not None and self.group.usage is not None:  # it counts threads that have ended, too
                ran = int(os.pread(self.group.usage, 64, 0).split()[1]) * 1000
        except (OSError, IndexError):
            return 0.0, 0.0
        return ran / 1e9, waited / 1e9

    def page_faults(self) -> int:
        """Of all its threads so far."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                figures = file.read().rpartition(b") ")[2].split()
        except OSError:
            return 0
        return int(figures[7]) + int(figures[9])

    def _exchange(self, message: bytes, timeout_s: float) -> float:
        if select.select([self.reply], [], [], 0)[0]:
            raise WorkerFailed("void", "the worker spoke without being asked", "protocol")
        sandbox.go_first(True)
        try:
            began = time.perf_counter()
            os.write(self.go, message)
            self._freeze(False)
            self._await(began + timeout_s)
            self._freeze(True)
            return time.perf_counter() - began
        finally:
            sandbox.go_first(False)

    def _await(self, deadline: float) -> None:
        left = max(deadline - time.perf_counter(), 0)
        if not select.select([self.reply], [], [], left)[0]:
            raise WorkerFailed("timeout", "a call did not end in time")
        answer = os.read(self.reply, 16)
        if answer == worker.OK:
            return
        if answer == b"":
            raise self._dead()
        names = {
            worker.RAISED: ("crashed", "it raised an error"), worker.BAD_LOAD: ("crashed", "it could not be loaded"),
            worker.MISFIT: ("incorrect", "the result does not fit the specification"),
            worker.NO_MEMORY: ("out_of_memory", "it ran out of the memory that a candidate may use"),
        }  # fmt: skip
        if answer not in names:
            raise WorkerFailed("void", "the worker's answer is not one of the protocol's", "protocol")
        raise WorkerFailed(*names[answer])

    def _dead(self) -> WorkerFailed:
        ready = select.select([self.report], [], [], 5)[0]
        text = os.read(self.report, 64).decode() if ready else ""
        self.exit_code = int(text.split()[0]) if text.split() else None
        if self.exit_code is not None and self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            hint = " (inputs are read-only; the memory limit also ends in one)" if name in ("SIGSEGV", "SIGBUS") else ""
            return WorkerFailed("crashed", f"it was ended by {name}{hint}")
        return WorkerFailed("crashed", "it ended by itself before it had answered")

    def _freeze(self, on: bool) -> None:
        if self.group is not None and self.group.freezer is not None:
            self.group.freeze(on)
        elif self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP if on else signal.SIGCONT)
                while on and not _stopped(self.pid):
                    os.sched_yield()

    def close(self) -> None:
        """End the worker and everything of it. Safe to call twice."""
        if self.life < 0:
            return
        os.close(self.life)
        self.life = -1
        with contextlib.suppress(OSError):
            while self.exit_code is None and select.select([self.report], [], [], 10)[0] and os.read(self.report, 64):
                pass
        for fd in (self.go, self.reply, self.log, self.report):
            os.close(fd)
        if self.group is not None:
            self.group.remove()
        self.outputs.close()


def _stopped(pid: int) -> bool:
    """Whether no thread of a process runs (true where it cannot be seen)."""
    folder = f"/proc/{pid}/task"
    try:
        for task in os.listdir(folder):
            with open(f"{folder}/{task}/stat", "rb") as file:
                if file.read().rpartition(b") ")[2][:1] not in b"TtZX":
                    return False
    except OSError:
        return True
    return True


def configuration(problem: Any, plan: Layout, scalars: list[Any]) -> dict[str, Any]:
    """A layout as a worker's `CONFIGURE` body."""
    free = {name: 0 for name, value in problem.axes.items() if value is None}
    return {
        "slots": plan.slots, "sets": plan.sets, "scalars": scalars, "axes": problem.c_values(plan.axes),
        "inputs": [asdict(p) if p else None for p in plan.inputs], "outputs": [asdict(p) for p in plan.outputs],
        "constant": [t.constant and t.shape is not None for t in problem.inputs], "fixed_axes": problem.c_values(free),
    }  # fmt: skip
