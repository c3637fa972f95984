"""Confinement by what the kernel offers: namespaces, a private root, Landlock, seccomp, cgroups, limits.

Nothing here is needed to be right for a verdict to be right: the ruler believes no child anyway. It keeps side
effects in. Each mechanism that the machine lacks is named, and the level that was reached is reported:

* `none`: an ordinary child process.
* `process`: resource limits, own session, closed descriptors, empty environment, no new privileges.
* `sandbox`: also a seccomp deny list and files confined by Landlock or a private root.
* `full`: also new PID, network, mount, IPC and UTS namespaces, no capabilities, a pids limit and a cgroup freezer.

Run as a script it is the launcher: `python -I -B -S sandbox.py POLICY_JSON ARGV…` (see `command`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEVELS = ("none", "process", "sandbox", "full")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class Policy:
    """What a confined process may see and use."""

    read: tuple[str, ...] = ()
    """Files and folders visible besides the system's, read-only, at their own paths."""
    write: tuple[str, ...] = ()
    """Folders that may be written, at their own paths. `/tmp` is a private folder in memory and the cwd."""
    fork: bool = True
    """Whether it may start processes (threads are always allowed)."""
    memory_bytes: int = 4 << 30
    tmp_bytes: int = 64 << 20
    pids: int = 128
    cpus: tuple[int, ...] = ()
    """Cores that it may run on; empty for all."""
    cpu_s: int = 600
    level: str = "full"
    """Highest level to try."""


@dataclass(frozen=True)
class Finished:
    """How a confined command ended. `output` is stdout and stderr together, cut to `limit` bytes, untrusted."""

    code: int
    output: str
    seconds: float
    timed_out: bool


# Numbers of the refused system calls: x86-64, aarch64 (None: does not exist there).
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "socket": (41, 198),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "kcmp": (312, 272),
    "open_by_handle_at": (304, 265), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "timer_create": (222, 107), "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
    "reboot": (169, 142), "swapon": (167, 224), "quotactl": (179, 60), "personality": (135, 92), "mbind": (237, 235),
    "move_mount": (429, 429), "fsopen": (430, 430), "open_tree": (428, 428), "mount_setattr": (442, 442),
    "shmget": (29, 194), "mq_open": (240, 180), "msgget": (68, 186), "fanotify_init": (300, 262),
}  # fmt: skip
_DENIED_WITHOUT_FORK = {"fork": (57, None), "vfork": (58, None), "memfd_create": (319, 279)}
_NAMESPACE_FLAGS = 0x7E020000 | 0x80
_CLONE_NEWPID, _CLONE_NEWUSER, _CLONE_NEWNS, _CLONE_NEWNET, _CLONE_NEWIPC, _CLONE_NEWUTS = (
    0x20000000, 0x10000000, 0x00020000, 0x40000000, 0x08000000, 0x04000000,
)  # fmt: skip
_MS = {"ro": 1, "nosuid": 2, "nodev": 4, "remount": 32, "bind": 4096, "rec": 16384, "private": 1 << 18}


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


# --- entering (runs in the single-threaded child) ------------------------------------------------------------------


def split(policy: Policy) -> list[str]:
    """Give the next child a PID namespace (and, without root, a user namespace); returns what failed."""
    if policy.level != "full":
        return ["PID namespace"]
    libc = _libc()
    if libc.unshare(_CLONE_NEWPID) == 0:
        return []
    # Without that right: in a user namespace. Tried in a child first, for one that cannot be mapped is a trap.
    probe = os.fork()
    if probe == 0:
        os._exit(bool(_user_namespace(libc)))
    if os.waitpid(probe, 0)[1] != 0:
        return ["PID namespace"]
    return [] if not _user_namespace(libc) else ["PID namespace"]


def _user_namespace(libc: ctypes.CDLL) -> str:
    """Enter a user namespace, its next child a PID namespace; returns what went wrong."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID), "user namespace")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        return str(error)
    return ""


def enter(policy: Policy, namespaced: bool) -> list[str]:
    """Confine the calling process (single-threaded, forked) for good; returns the mechanisms that were lacking."""
    lacking: list[str] = []
    libc = _libc()
    if policy.level == "none":
        return ["everything: confinement `none` was asked for"]

    def attempt(name: str, step: object, *args: object) -> bool:
        try:
            step(*args)  # type: ignore[operator]
        except OSError as error:
            lacking.append(f"{name} ({error.strerror or error})")
            return False
        return True

    if policy.cpus:
        attempt("cores", os.sched_setaffinity, 0, set(policy.cpus))
    _limits(policy)
    full = policy.level == "full"
    rooted = False
    if full:
        spaces = attempt(
            "namespaces",
            lambda: _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS), "unshare"),
        )
        rooted = spaces and attempt("private root", _private_root, policy, namespaced)
    attempt("no_new_privs", lambda: _check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs"))
    if policy.level in ("sandbox", "full"):
        landlocked = attempt("Landlock", _landlock, policy, rooted)
        attempt("dropping capabilities", _drop_capabilities)
        attempt("seccomp", _seccomp, policy.fork)
        if not landlocked and not rooted:
            lacking.append("files")
    return lacking


def level_reached(policy: Policy, lacking: list[str]) -> str:
    """The level that was reached, from what was lacking."""
    if policy.level in ("none", "process") or sys.platform != "linux":
        return policy.level if policy.level == "none" else "process"
    missing = {text.split(" (")[0] for text in lacking}
    if missing & {"seccomp", "files", "no_new_privs"}:
        return "process"
    return "sandbox" if policy.level == "sandbox" or missing - {"Landlock"} else "full"


def _limits(policy: Policy) -> None:
    for kind, value in (
        (resource.RLIMIT_DATA, policy.memory_bytes),
        (resource.RLIMIT_CPU, policy.cpu_s),
        (resource.RLIMIT_FSIZE, max(policy.tmp_bytes, 64 << 20)),
        (resource.RLIMIT_NOFILE, 512),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 1 << 20),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _private_root(policy: Policy, namespaced: bool) -> None:
    """A root folder in memory that holds only what the policy names, read-only, and a small writable /tmp."""
    libc = _libc()

    def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        encoded = [None if text is None else text.encode() for text in (source, target, kind)]
        _check(libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")

    mount("none", "/", None, _MS["rec"] | _MS["private"])
    # Opened first: the new root may hide the very folder that a source lies in.
    sources: list[tuple[str, int, int]] = []
    links: list[tuple[str, str]] = []
    for path, flags in (
        *((p, _MS["ro"]) for p in (*SYSTEM, *policy.read)),
        *((p, 0) for p in policy.write),
        *((p, -1) for p in DEVICES),
    ):
        if os.path.islink(path) and path in SYSTEM:
            links.append((path, os.readlink(path)))
        elif os.path.exists(path):
            sources.append((path, flags, os.open(path, os.O_PATH | os.O_CLOEXEC)))
    base = "/tmp"
    mount("tmpfs", base, "tmpfs", _MS["nosuid"] | _MS["nodev"], "size=4m,mode=755")
    try:
        _fill_root(policy, base, mount, sources=sources, links=links, namespaced=namespaced)
    except OSError:
        libc.umount2(base.encode(), 2)
        raise
    os.chdir(base)
    number = 155 if platform.machine() == "x86_64" else 41
    _check(libc.syscall(number, b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(libc.umount2(b"/old", 2), "umount")
    os.chdir("/tmp")


def _fill_root(
    policy: Policy, base: str, mount: Callable[..., None], *, sources: list[tuple[str, int, int]],
    links: list[tuple[str, str]], namespaced: bool,
) -> None:  # fmt: skip
    """Put what the policy names into a new root folder at `base`."""
    for path, target in links:
        os.symlink(target, base + path)
    for path in ("/tmp", "/proc", "/dev/shm", "/old"):
        os.makedirs(base + path)
    mount("tmpfs", base + "/tmp", "tmpfs", _MS["nosuid"] | _MS["nodev"], f"size={policy.tmp_bytes},mode=1777")
    mount("tmpfs", base + "/dev/shm", "tmpfs", _MS["nosuid"] | _MS["nodev"], "size=4m,mode=1777")
    for path, flags, fd in sorted(sources):
        target = base + path
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not os.path.exists(target):
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(f"/proc/self/fd/{fd}", target, None, _MS["bind"] | (_MS["rec"] if flags >= 0 else 0))
        if flags >= 0:
            safe = _MS["nosuid"] | (0 if "/dev/" in path else _MS["nodev"])
            mount("none", target, None, _MS["bind"] | _MS["remount"] | flags | safe)
        os.close(fd)
    if namespaced:
        mount("proc", base + "/proc", "proc", _MS["nosuid"] | _MS["nodev"] | 8)
    mount("none", base, None, _MS["bind"] | _MS["remount"] | _MS["ro"] | _MS["nosuid"])


def _landlock(policy: Policy, rooted: bool) -> None:
    """Files as in the policy, no TCP, no signals and no abstract sockets to the outside."""
    libc = _libc()
    abi = _check(libc.syscall(444, None, ctypes.c_size_t(0), 1), "Landlock")
    everything = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    read = 0b1101  # execute, read file, read dir
    attributes = struct.pack("<QQQ", everything, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _check(libc.syscall(444, attributes, ctypes.c_size_t(size), 0), "Landlock ruleset")
    writable = tuple(p for p in ("/tmp", "/dev/shm", *policy.write) if rooted or p in policy.write)
    for path, access in (
        *((p, read) for p in (*SYSTEM, *policy.read, "/proc")),
        *((p, everything) for p in writable),
        *((p, read | 2) for p in DEVICES),
    ):
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access if os.path.isdir(path) else access & (0b111 | (1 << 14))
        rule = struct.pack("<Qi", allowed & everything, fd)
        _check(libc.syscall(445, ruleset, 1, rule, 0), f"Landlock rule {path}")
        os.close(fd)
    _check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _check(libc.syscall(446, ruleset, 0), "Landlock restrict")
    os.close(ruleset)


def _drop_capabilities() -> None:
    libc = _libc()
    for number in range(64):
        if libc.prctl(24, number, 0, 0, 0) < 0:
            break
    _check(libc.prctl(47, 4, 0, 0, 0), "ambient capabilities")
    header = struct.pack("<Ii", 0x20080522, 0)
    number = 126 if platform.machine() == "x86_64" else 91
    _check(libc.syscall(number, header, struct.pack("<6I", *[0] * 6)), "capset")


def _seccomp(fork: bool) -> None:
    """A deny list: refused calls fail with EPERM (clone3 with ENOSYS, so that libc falls back to clone)."""
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise OSError(38, f"no system-call table for {machine}")
    column = 0 if machine == "x86_64" else 1
    denied = {**_DENIED, **({} if fork else _DENIED_WITHOUT_FORK)}
    numbers = sorted({number for pair in denied.values() if (number := pair[column]) is not None})
    clone, clone3, fcntl, ioctl = ((56, 435, 72, 16), (220, 435, 25, 29))[column]
    allow, refuse, missing = 0x7FFF0000, 0x00050001, 0x00050026
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, (0xC000003E, 0xC00000B7)[column]),
        (give, 0, 0, refuse),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),
        (give, 0, 0, refuse),
    ]
    for number in numbers:
        code += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    code += [(equal, 0, 1, clone3), (give, 0, 0, missing)]
    # clone: no new namespaces; without `fork` only threads.
    code += [(equal, 0, 6 if not fork else 4, clone), (load, 0, 0, 16), (any_bit, 0, 1, _NAMESPACE_FLAGS)]
    code += [(give, 0, 0, refuse)]
    if not fork:
        code += [(any_bit, 1, 0, 0x00010000), (give, 0, 0, refuse)]
    code += [(give, 0, 0, allow)]
    # fcntl(F_SETSIG) could let a stopped process wake itself; ioctl(TIOCSTI) could type into our terminal.
    for call, value in ((fcntl, 10), (ioctl, 0x5412)):
        code += [(equal, 0, 4, call), (load, 0, 0, 24), (equal, 0, 1, value), (give, 0, 0, refuse)]
        code += [(give, 0, 0, allow)]
    code += [(give, 0, 0, allow)]
    packed = b"".join(struct.pack("<HBBI", *step) for step in code)
    buffer = ctypes.create_string_buffer(packed)
    program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(buffer))
    libc = _libc()
    _check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _check(libc.prctl(22, 2, program, 0, 0), "seccomp")


# --- running a command -------------------------------------------------------------------------------------------


def command(argv: list[str], policy: Policy) -> list[str]:
    """`argv` wrapped so that `subprocess.Popen` starts it confined.

    The launcher stays as its parent, ends with its exit code, and kills it when the starter dies or SIGTERM comes.
    """
    return [sys.executable, "-I", "-B", "-S", __file__, json.dumps(asdict(policy)), *argv]


def run(argv: list[str], policy: Policy, *, timeout_s: float, limit: int = 1 << 16) -> Finished:
    """Run a command confined and wait for it; kills all of it after `timeout_s`.

    Raises:
        FileNotFoundError: the program is not there.
    """
    began = time.monotonic()
    child = subprocess.Popen(
        command(argv, policy), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={"PATH": os.defpath, "LC_ALL": "C"}, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    kept, timed_out = bytearray(), False
    try:
        while True:
            left = began + timeout_s - time.monotonic()
            if not select.select([child.stdout], [], [], max(left, 0))[0]:
                timed_out = True
                break
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                break
            kept += chunk[: max(0, limit - len(kept))]
        if not timed_out:
            try:
                child.wait(max(began + timeout_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                timed_out = True
    finally:
        child.terminate()
        child.wait()
        child.stdout.close()
        if child.stdin is not None:
            child.stdin.close()
    return Finished(child.returncode, kept.decode(errors="replace"), time.monotonic() - began, timed_out)


def supervise(child: int, life: int | None) -> int:
    """Wait for `child`; kill it when `life` (the read end of a pipe) closes or SIGTERM comes. Returns its exit code."""
    wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    stop = False

    def terminate(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watch = [wake_r] + ([life] if life is not None else [])
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        ready = select.select(watch, [], [])[0]
        if wake_r in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_r, 512)
        if stop or (life in ready):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            watch = [wake_r]
            stop = False


def go_first(first: bool) -> None:
    """Let this thread, and threads it starts, run before the machine's ordinary work, where that is allowed.

    Real-time turns, since a higher weight alone waits out the time slice of whoever runs. Ruler and worker have one
    priority: they take turns. The kernel keeps a twentieth of each second for the others.
    """
    with contextlib.suppress(OSError, AttributeError):
        policy = os.SCHED_RR if first else os.SCHED_OTHER
        os.sched_setscheduler(0, policy, os.sched_param(int(first)))


def die_with_parent() -> None:
    """SIGKILL this process when its parent's thread ends."""
    if sys.platform == "linux":
        _libc().prctl(1, signal.SIGKILL, 0, 0, 0)


def read_policy(data: dict[str, Any]) -> Policy:
    """A policy back from its JSON."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Policy(**values)


def main() -> int:
    """The launcher."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from kernels.ruler.cgroup import Cgroup

    policy = read_policy(json.loads(sys.argv[1]))
    argv = sys.argv[2:]
    starter = os.getppid()
    die_with_parent()
    if os.getppid() != starter:
        return 1
    group = Cgroup("run", policy.pids) if policy.level == "full" else None
    failed = split(policy)
    child = os.fork()
    if child == 0:
        die_with_parent()
        if group is not None:
            group.add(os.getpid())
        if policy.level != "none":
            os.setsid()
        bare = any(name.startswith(("namespaces", "private root")) for name in enter(policy, not failed))
        scratch = policy.write[0] if policy.write and (bare or policy.level != "full") else "/tmp"
        try:
            os.execvpe(argv[0], argv, {"PATH": os.defpath, "HOME": scratch, "TMPDIR": scratch, "LC_ALL": "C"})
        except OSError as error:
            sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
            os._exit(127)
    try:
        code = supervise(child, None)
    finally:
        if group is not None:
            group.remove()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
