"""A child process that never outlives its parent and speaks JSON over a socket.

Lifetime: `spawn` (fresh exec, clean environment, own session, PDEATHSIG, pid file) → `send` / `receive` → `stop`
(polite message, then the whole group killed). `reap` ends what dead parents left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import queue
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from profiles.engines.base import EngineFailure

Message = dict[str, Any]
_HEADER = struct.Struct(">I")
_MOST_BYTES = 1 << 28
_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

# glibc's sliding thresholds make the same process fast or slow by chance (page faults at each call): pinned everywhere.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}

# Runs before anything of ours is imported, so that a parent that died during exec is noticed.
_BOOTSTRAP = """
import ctypes, os, sys
parent, root = int(sys.argv[1]), sys.argv[2]
ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
if os.getppid() != parent:
    os._exit(0)
sys.path.insert(0, root)
from profiles.engines.child import child_main
child_main(int(sys.argv[3]), sys.argv[4])
"""


class Channel:
    """Length-prefixed JSON over a stream socket. Sending is safe from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Write one message. Raises OSError when the other side is gone."""
        body = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            self._socket.sendall(_HEADER.pack(len(body)) + body)

    def receive(self) -> Message | None:
        """Read one message; None when the other side is gone. Raises ValueError on what is not a message."""
        header = self._exactly(_HEADER.size)
        if header is None:
            return None
        (size,) = _HEADER.unpack(header)
        if size > _MOST_BYTES:
            raise ValueError(f"a message of {size} bytes")
        body = self._exactly(size)
        if body is None:
            return None
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError("a message that is not an object")
        return message

    def readable(self, timeout_s: float) -> bool:
        """Whether something (or the end) can be read within `timeout_s`."""
        return bool(select.select([self._socket], [], [], max(0.0, timeout_s))[0])

    def close(self) -> None:
        """Close this side; a thread that waits in `receive` wakes up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


class Child:
    """A running child, as its parent sees it. Made by `spawn`."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, pid_file: Path, log: Path) -> None:
        self.process = process
        self.log = log
        self._channel = channel
        self._pid_file = pid_file
        self._stopped = threading.Lock()
        self._oom_kills = _oom_kills()
        self._peak_bytes = 0

    @property
    def pid(self) -> int:
        """Process id; also that of its session and group."""
        return self.process.pid

    def send(self, message: Message) -> None:
        """Send a message. Raises EngineFailure when the child is gone."""
        try:
            self._channel.send(message)
        except OSError:
            raise self.failure() from None

    def receive(self) -> Message | None:
        """Wait for one message; None when the child is gone (also after rubbish on the line, which ends it)."""
        try:
            return self._channel.receive()
        except ValueError:
            self._kill()
            return None

    def ask(self, message: Message, timeout_s: float) -> Message:
        """Send a message and wait for the one reply; only where nothing else reads from this child.

        Raises:
            EngineFailure: the child is gone, answers with a failure, or does not answer in time (`hang`).
        """
        self.send(message)
        return self.answer(str(message.get("op")), timeout_s)

    def answer(self, what: str, timeout_s: float) -> Message:
        """Wait for the reply to something sent before; see `ask`."""
        if not self._channel.readable(timeout_s):
            raise EngineFailure("hang", f"no answer to {what!r} in {max(timeout_s, 0):.0f} s. {self.tail()}")
        reply = self.receive()
        if reply is None:
            raise self.failure()
        raise_failure(reply)
        return reply

    def waiting(self, timeout_s: float) -> bool:
        """Whether a message, or the end, is there to `receive` within `timeout_s`."""
        return self._channel.readable(timeout_s)

    def failure(self) -> EngineFailure:
        """Why the child is gone: killed for memory, or a crash, with the tail of its log. Ends what is left of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        self._kill()
        code = self.process.wait()
        tail = self.tail()
        memory = _oom_kills() > self._oom_kills and code == -signal.SIGKILL
        kind = "out_of_memory" if memory or is_memory_error(tail) else "crash"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return EngineFailure(kind, f"the engine process ended: {how}. {tail}".strip())  # type: ignore[arg-type]

    def tail(self, lines: int = 15) -> str:
        """Last lines of the log."""
        try:
            text = self.log.read_bytes()[-8000:].decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def peak_memory_bytes(self) -> int:
        """Highest resident set so far of the child and of what it started (VmHWM, summed)."""
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            family = [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]
            self._peak_bytes = max(self._peak_bytes, sum(_peak_bytes(pid) for pid in family))
        return self._peak_bytes

    def stop(self, grace_s: float = 0.0) -> None:
        """End the child and all that it started. `grace_s`: time to leave by itself first. Never raises; can repeat."""
        with self._stopped:
            if grace_s > 0 and self.process.poll() is None:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    self._channel.send({"op": "stop"})
                    self.process.wait(timeout=grace_s)
            self._kill()
            self.process.wait()
            self._channel.close()
            self._pid_file.unlink(missing_ok=True)

    def _kill(self) -> None:
        # The group is killed before the child is waited for: until then its id cannot belong to anybody else.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def spawn(
    entry: str,
    *,
    children: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
    name: str = "engine",
    scratch: Path | None = None,
) -> Child:
    """Start `entry` ("package.module:function") in a fresh interpreter; it is called with its Channel.

    The child gets no environment but PATH, HOME, TMPDIR, LANG, the pinned allocator and `environment`; no open files
    but the socket and the log; a session of its own; no way to gain privileges. When this process dies, however, it is
    killed by the kernel, and when the socket closes it ends itself with all that it started.

    Args:
        entry: module and function to run in the child.
        children: folder for the pid file by which `reap` finds a leftover.
        log: file that takes its standard output and error; appended to.
        environment: more variables.
        name: what it is, for the pid file.
        scratch: a folder inside `children` that `reap` takes away with a leftover.

    Raises:
        EngineFailure: the process cannot be started (`start`).
    """
    children.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    ours, theirs = socket.socketpair()
    try:
        clean = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if key in os.environ}
        clean |= {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"} | MALLOC_ENVIRONMENT | dict(environment or {})
        command = [sys.executable, "-I", "-B", "-c", _BOOTSTRAP]
        command += [str(os.getpid()), str(_ROOT), str(theirs.fileno()), entry]
        with log.open("ab") as output:
            process = _SPAWNER.call(
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=clean,
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            )
    except OSError as error:
        ours.close()
        raise EngineFailure("start", f"the engine process cannot be started: {error}") from error
    finally:
        theirs.close()
    pid_file = children / f"{name}-{process.pid}.json"
    record: dict[str, Any] = {"pid": process.pid, "started": _started(process.pid), "parent": os.getpid()}
    record["parent_started"] = _started(os.getpid())
    record["scratch"] = None if scratch is None else scratch.name
    temporary = pid_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    temporary.replace(pid_file)
    return Child(process, Channel(ours), pid_file, log)


def reap(children: Path) -> int:
    """Kill the groups of children whose parent is dead; returns how many. Knows them by pid *and* start time."""
    killed = 0
    for pid_file in sorted(children.glob("*.json")):
        try:
            record = json.loads(pid_file.read_text())
            pid, started = int(record["pid"]), record["started"]
            parent, parent_started = int(record["parent"]), record["parent_started"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not one of ours, or just going away
        if _started(parent) is not None and _started(parent) == parent_started:
            continue
        if started is not None and _started(pid) == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
                killed += 1
        if record.get("scratch"):
            shutil.rmtree(children / Path(record["scratch"]).name, ignore_errors=True)
        pid_file.unlink(missing_ok=True)
    return killed


def raise_failure(reply: Message) -> None:
    """Raise the EngineFailure that a reply carries, if it carries one."""
    if "failure" in reply:
        kind = str(reply["failure"])
        known = kind in ("crash", "out_of_memory", "hang", "refused", "start")
        raise EngineFailure(kind if known else "crash", str(reply.get("detail", "")))  # type: ignore[arg-type]


def is_memory_error(text: str) -> bool:
    """Whether an error message says that memory ran out."""
    words = ("MemoryError", "bad_alloc", "can't allocate memory", "Cannot allocate memory", "out of memory")
    return any(word in text for word in (*words, "OutOfMemoryError"))


# --- in the child ------------------------------------------------------------------------------------------------


def child_main(descriptor: int, entry: str) -> None:
    """What the bootstrap runs: privileges off, then `entry(channel)`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    channel = Channel(socket.socket(fileno=descriptor))
    module, function = entry.split(":")
    getattr(importlib.import_module(module), function)(channel)
    sys.stdout.flush()
    os._exit(0)  # no destructors: libraries with threads of their own like to hang in them


def read_into(channel: Channel, inbox: queue.SimpleQueue[Message]) -> None:
    """Start the thread that fills `inbox`; when the parent is gone it kills this process and its whole group."""

    def loop() -> None:
        while (message := channel.receive()) is not None:
            inbox.put(message)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=loop, name="from-parent", daemon=True).start()


# --- helpers -----------------------------------------------------------------------------------------------------


class _Spawner:
    """One thread that starts all children and lives as long as the process.

    The kernel sends PDEATHSIG when the *thread* that started a child ends, not the process: a child started from a
    thread of a pool would die with that thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()

    def call(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # also after a fork, which copies no thread
                self._work = queue.SimpleQueue()
                self._thread = threading.Thread(target=self._loop, args=(self._work,), name="spawner", daemon=True)
                self._thread.start()
            answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._work.put((start, answer))
        result = answer.get()
        if isinstance(result, BaseException):
            raise result
        return result

    @staticmethod
    def _loop(work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]) -> None:
        while True:
            start, answer = work.get()
            try:
                answer.put(start())
            except BaseException as error:
                answer.put(error)


_SPAWNER = _Spawner()


def _started(pid: int) -> int | None:
    """Start time in clock ticks since boot (field 22 of /proc/pid/stat); None when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _peak_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _oom_kills() -> int:
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def wait_for_message(inbox: queue.SimpleQueue[Message], timeout_s: float) -> Message | None:
    """The next message, or None when none came in time."""
    try:
        return inbox.get(timeout=timeout_s) if timeout_s > 0 else inbox.get_nowait()
    except queue.Empty:
        return None


def now_s() -> float:
    """The clock of all token stamps."""
    return time.perf_counter()


def environment_for(threads: int, wait_policy: str, extra: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """OpenMP and Hugging Face variables of an engine process."""
    values = {
        "USE_HUB_KERNELS": "NO",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "0",
    }
    values |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    values |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if wait_policy != "default":
        values["OMP_WAIT_POLICY"] = wait_policy.upper()
    return values | dict(extra)
