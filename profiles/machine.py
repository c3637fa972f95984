"""What this machine is: usable CPUs, caches, memory, compiler, and how busy it is."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

CPU_FOLDER = Path("/sys/devices/system/cpu")


def usable_cpus() -> tuple[int, ...]:
    """Logical CPUs that this process may use, fewer where a cgroup's quota allows fewer."""
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cpus = list(range(os.cpu_count() or 1))
    quota = _cgroup_cpus()
    return tuple(cpus[: max(1, int(quota))] if quota is not None else cpus)


def cpus_spread() -> tuple[int, ...]:
    """Usable CPUs in the order in which threads should take them: over last-level caches first, siblings last."""

    def key(cpu: int) -> tuple[int, int, str]:
        siblings = _cpu_list(CPU_FOLDER / f"cpu{cpu}/topology/thread_siblings_list") or [cpu]
        shared = max(_cpu_caches(cpu), key=lambda c: c[0], default=(0, "", 0))[1]
        return siblings.index(cpu) if cpu in siblings else 0, _cpu_list_of(shared).index(cpu) if shared else cpu, shared

    return tuple(sorted(usable_cpus(), key=key))


def caches(cpus: Sequence[int]) -> dict[str, int]:
    """Bytes of data cache that these CPUs have together, by level (`l1`, `l2`, `l3`), smallest first.

    A level that holds no more than the one before is left out; empty where the system does not tell.
    """
    found: dict[str, dict[str, int]] = {}
    sizes: dict[str, int] = {}
    for cpu in cpus:
        for level, shared, size in _cpu_caches(cpu):
            found.setdefault(f"l{level}", {})[shared] = size
    for name in sorted(found):
        total = sum(found[name].values())
        if total > 2 * max(sizes.values(), default=0):
            sizes[name] = total
    return sizes


def idle_share(cpus: Sequence[int], seconds: float) -> float:
    """Share of these CPUs' time that was idle over the next `seconds`."""
    before = psutil.cpu_times(percpu=True)
    time.sleep(seconds)
    after = psutil.cpu_times(percpu=True)
    chosen = [i for i in cpus if i < len(after)] or range(len(after))
    total = sum(sum(after[i][:8]) - sum(before[i][:8]) for i in chosen)
    idle = sum(after[i].idle - before[i].idle for i in chosen)
    return idle / total if total > 0 else 1.0


def cpu_name() -> str:
    """What the vendor calls this CPU."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


@functools.cache
def compiler_version(compiler: str = "g++") -> str:
    """First line of `compiler --version`; empty when there is none."""
    path = shutil.which(compiler)
    if path is None:
        return ""
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout.split(
            "\n"
        )[0]
    except (OSError, subprocess.SubprocessError):
        return ""


def fingerprint() -> str:
    """16 hex digits over CPU model, usable CPUs, features, caches, memory (GiB), compiler and torch versions."""
    cpus = usable_cpus()
    parts = [
        cpu_name(),
        platform.machine(),
        len(cpus),
        " ".join(sorted((_cpuinfo().get("flags") or _cpuinfo().get("Features") or "").split())),
        caches(cpus),
        round(psutil.virtual_memory().total / 2**30),
        compiler_version(),
        importlib.metadata.version("torch"),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    entries: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            entries[name.strip()] = value.strip()
    return entries


def _cgroup_cpus() -> float | None:
    """CPUs that the cgroup's quota allows; None without a quota."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        micros = int((folder / "cpu.cfs_quota_us").read_text())
        return micros / int((folder / "cpu.cfs_period_us").read_text()) if micros > 0 else None
    return None


def _cpu_caches(cpu: int) -> list[tuple[int, str, int]]:
    """(level, CPUs that share it, bytes) of each data or unified cache of one CPU."""
    rows = []
    for folder in sorted((CPU_FOLDER / f"cpu{cpu}/cache").glob("index*")):
        with contextlib.suppress(OSError, ValueError):
            if (folder / "type").read_text().strip() == "Instruction":
                continue
            size = (folder / "size").read_text().strip()
            number = int(size.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(size[-1], 1)
            shared = (folder / "shared_cpu_list").read_text().strip()
            rows.append((int((folder / "level").read_text()), shared, number))
    return rows


def _cpu_list(file: Path) -> list[int]:
    try:
        return _cpu_list_of(file.read_text().strip())
    except OSError:
        return []


def _cpu_list_of(text: str) -> list[int]:
    """CPUs in the kernel's spelling: `0-3,8`."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
