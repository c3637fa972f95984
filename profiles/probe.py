"""The child that measures this CPU's ceilings: `python -m profiles.probe CONFIG`, JSON lines on standard output.

It is a process of its own so that thread pools, pinning and big buffers leave no trace in the caller. Every kernel of
`ceilings.cpp`, and torch's own, competes; the best of them is the ceiling. The config is a JSON object with `library`
(the compiled ceilings.cpp) and `cap_s` (seconds that it may take). Lines are `{"progress": text}` and at last
`{"result": ...}`, see `measure`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from profiles.machine import caches, cpus_spread, idle_share

PASS_S = 0.003
"""A sample repeats its pass over a small buffer until it takes about this long."""
SPREAD_LIMIT, DRIFT_LIMIT, FOREIGN_LIMIT, STEAL_LIMIT = 0.15, 0.10, 0.10, 0.02


@dataclass
class Contender:
    """One kernel for one ceiling, with what it reached so far."""

    name: str
    sample: Callable[[], float]
    """Runs once; returns giga (1e9) bytes or operations per second."""
    values: list[float] = field(default_factory=list)

    @property
    def top(self) -> float:
        """Upper decile: the best that is not a single fluke."""
        return float(np.quantile(self.values, 0.9))


def contest(contenders: list[Contender], budget_s: float, finals: int = 9) -> Contender:
    """The best contender: all are tried twice in turn, then the best three until they have `finals` values.

    Repeats are interleaved, so that a burst of foreign load does not fall on one contender alone.
    """
    end = time.perf_counter() + budget_s
    for round_ in range(2):
        for contender in contenders:
            if round_ == 0 or time.perf_counter() < end:
                contender.values.append(contender.sample())
    best = sorted(contenders, key=lambda c: -max(c.values))[:3]
    while len(best[0].values) < finals and (time.perf_counter() < end or len(best[0].values) < 4):
        for contender in best:
            contender.values.append(contender.sample())
    return max(best, key=lambda c: c.top)


class Kernels:
    """The compiled kernels, called through ctypes on buffers of their own."""

    def __init__(self, library: str, cpus: tuple[int, ...]) -> None:
        self.lib = ctypes.CDLL(library)
        self.cpus = (ctypes.c_int * len(cpus))(*cpus)
        for name in ("read", "write", "copy", "arithmetic", "operations"):
            getattr(self.lib, f"ceilings_{name}").restype = ctypes.c_double
        self.lib.ceilings_allocate.restype = ctypes.c_void_p

    @contextlib.contextmanager
    def buffer(self, size_bytes: int, threads: int) -> Iterator[ctypes.c_void_p]:
        """Touched memory in huge pages where there are any."""
        pointer = self.lib.ceilings_allocate(ctypes.c_size_t(size_bytes), threads, self.cpus)
        if not pointer:
            raise MemoryError(f"no {size_bytes} bytes for the bandwidth measurement")
        try:
            yield ctypes.c_void_p(pointer)
        finally:
            self.lib.ceilings_free(ctypes.c_void_p(pointer), ctypes.c_size_t(size_bytes))

    def memory(self, buffer: ctypes.c_void_p, size_bytes: int, threads: int) -> dict[str, list[Contender]]:
        """Contenders by direction: `read`, `write`, `copy`."""
        size, n, size_t = ctypes.c_size_t(size_bytes), threads, ctypes.c_size_t
        passes = max(1, int(PASS_S * 40e9 * threads / size_bytes))
        gigabytes = size_bytes * passes / 1e9
        lib, cpus = self.lib, self.cpus

        def reader(streams: int, ahead: int) -> Contender:
            def sample() -> float:
                return gigabytes / lib.ceilings_read(buffer, size, n, cpus, passes, streams, size_t(ahead))

            return Contender(f"{streams} streams, prefetch {ahead} B", sample)

        def writer(streams: int, kind: int) -> Contender:
            def sample() -> float:
                return gigabytes / lib.ceilings_write(buffer, size, n, cpus, passes, streams, kind)

            return Contender(f"{KINDS[kind]}, {streams} streams", sample)

        def copier(streams: int, kind: int, ahead: int) -> Contender:
            def sample() -> float:
                return gigabytes / lib.ceilings_copy(buffer, size, n, cpus, passes, streams, kind, size_t(ahead))

            return Contender(f"{KINDS[kind]}, {streams} streams, prefetch {ahead} B", sample)

        ways = [(1, 0), (4, 0), (1, 1), (4, 1), (1, 2)]
        return {
            "read": [reader(s, ahead) for s in (1, 2, 4, 8, 16) for ahead in (0, 512, 2048, 8192)],
            "write": [writer(s, kind) for s, kind in ways],
            "copy": [copier(s, kind, ahead) for s, kind in ways for ahead in ((0,) if kind == 2 else (0, 2048))],
        }

    def arithmetic(self, dtype: str, threads: int) -> Contender | None:
        """The register-blocked loop for that dtype, or None where this CPU has no instruction for it."""
        kind = {"float32": 0, "bfloat16": 1, "int8": 2}[dtype]
        operations = self.lib.ceilings_operations(kind)
        if not operations:
            return None
        rounds = 300_000

        def sample() -> float:
            seconds = self.lib.ceilings_arithmetic(kind, threads, self.cpus, ctypes.c_size_t(rounds))
            return operations * rounds * threads / 1e9 / seconds

        return Contender("register-blocked loop", sample)


KINDS = ("stores", "stores past the caches", "libc")


def torch_memory(size_bytes: int, threads: int) -> dict[str, list[Contender]]:
    """What torch's own sum, fill and copy reach; a ceiling that an eager operator beats would be none."""
    import torch

    data = torch.ones(size_bytes // 4, dtype=torch.float32)
    half = data.numel() // 2

    def timed(run: Callable[[], Any]) -> Callable[[], float]:
        def sample() -> float:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            run()
            return size_bytes / 1e9 / (time.perf_counter() - start)

        return sample

    return {
        "read": [Contender("torch.sum", timed(data.sum))],
        "write": [Contender("torch.fill_", timed(lambda: data.fill_(1.5)))],
        "copy": [Contender("torch.copy_", timed(lambda: data[:half].copy_(data[half : 2 * half])))],
    }


def torch_matmul(dtype: str, threads: int) -> Contender | None:
    """A square matmul in torch; None where torch has none for that dtype here."""
    import torch

    kind, n = getattr(torch, dtype), 256 if dtype == "float16" else 768  # float16 is slow on most CPUs
    a = torch.ones((n, n), dtype=kind) if dtype == "int8" else torch.randn(n, n).to(kind)
    run = torch._int_mm if dtype == "int8" else torch.matmul
    try:
        run(a, a)
    except RuntimeError:
        return None

    def sample() -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        run(a, a)
        return 2 * n**3 / 1e9 / (time.perf_counter() - start)

    return Contender("torch.matmul", sample)


def call_overhead_us() -> float:
    """Microseconds of the smallest torch operator in eager mode: the best of several batches, as load only adds."""
    import torch

    torch.set_num_threads(1)
    x = torch.ones(1)
    batches = []
    with torch.inference_mode():
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(1000):
                torch.add(x, x)
            batches.append((time.perf_counter() - start) * 1e3)
    return min(batches)


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, … and all of them."""
    return sorted({2**i for i in range(int(math.log2(cores)) + 1)} | {cores})


def measure_once(kernels: Kernels, cores: int, budget_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """One full measurement: `bandwidths` and `flops` as rows of the Target record, `call_overhead_us`, `drift`."""
    counts, bandwidths, flops = thread_counts(cores), [], []
    order = cpus_spread()
    groups = sum(len(caches(order[:n])) + 1 for n in counts)
    slot = budget_s * 0.65 / groups
    final: Contender | None = None
    first = 0.0
    for threads in counts:
        held = caches(order[:threads])
        last = max(held.values(), default=32 << 20)
        dram = int(min(max(4 * last, 64 << 20), 2 << 30, psutil.virtual_memory().available // 8))
        levels = [(level, capacity // 2, capacity) for level, capacity in held.items()] + [("dram", dram, None)]
        for level, wanted, capacity in levels:
            size = wanted // (8192 * threads) * 8192 * threads
            if not size:
                continue
            say(f"{level} bandwidth, {threads} thread{'s' * (threads > 1)}")
            with kernels.buffer(size, threads) as buffer:
                contenders = kernels.memory(buffer, size, threads)
                if level == "dram":
                    for direction, extra in torch_memory(size, threads).items():
                        contenders[direction] += extra
                shares = {"read": 0.6, "write": 0.2, "copy": 0.2}
                best = {way: contest(contenders[way], slot * share) for way, share in shares.items()}
            reads = best["read"].values
            quarters = statistics.quantiles(reads, n=4)
            bandwidths.append(
                {
                    "level": level,
                    "working_set_bytes": size,
                    "capacity_bytes": capacity,
                    "threads": threads,
                    **{f"{way}_gbps": round(winner.top, 3) for way, winner in best.items()},
                    "relative_spread": round((quarters[2] - quarters[0]) / statistics.median(reads), 4),
                    "kernel": best["read"].name,
                }
            )
    dtypes = ("float32", "bfloat16", "float16", "int8")
    slot = budget_s * 0.25 / (len(counts) * len(dtypes))
    for threads in counts:
        for dtype in dtypes:
            say(f"{dtype} arithmetic, {threads} thread{'s' * (threads > 1)}")
            loop = kernels.arithmetic(dtype, threads) if dtype != "float16" else None
            both = [c for c in (loop, torch_matmul(dtype, threads)) if c is not None]
            if not both:
                continue
            best_flops = contest(both, slot)
            quarters = statistics.quantiles(best_flops.values, n=4)
            spread = (quarters[2] - quarters[0]) / statistics.median(best_flops.values)
            row = {"dtype": dtype, "threads": threads, "gflops": round(best_flops.top, 3)}
            flops.append(row | {"relative_spread": round(spread, 4), "kernel": best_flops.name})
            if dtype == "float32" and threads == counts[-1]:
                final, first = loop or both[0], (loop or both[0]).top
    say("the same again, for the noise")
    overhead = call_overhead_us()
    assert final is not None  # float32 is always there
    again = float(np.quantile([final.sample() for _ in range(len(final.values))], 0.9))
    return {
        "bandwidths": bandwidths,
        "flops": flops,
        "call_overhead_us": round(overhead, 3),
        "drift": abs(again / first - 1),
    }


def noise(once: dict[str, Any], foreign: float, steal: float) -> str:
    """Why this measurement cannot be trusted, in a sentence; empty when it can.

    Args:
        once: what `measure_once` returned.
        foreign: share of the CPUs' time that other processes used meanwhile.
        steal: share that the hypervisor took.
    """
    reasons = []
    if foreign > FOREIGN_LIMIT:
        reasons.append(f"other processes used {foreign:.0%} of the CPUs")
    if steal > STEAL_LIMIT:
        reasons.append(f"the hypervisor took {steal:.0%} of the CPUs' time")
    if once["drift"] > DRIFT_LIMIT:
        reasons.append(f"the same arithmetic loop measured twice differed by {once['drift']:.0%}")
    rows = [(f"{row['level']} with {row['threads']} threads", row["relative_spread"]) for row in once["bandwidths"]]
    rows += [(f"{row['dtype']} with {row['threads']} threads", row["relative_spread"]) for row in once["flops"]]
    where, spread = max(rows, key=lambda row: row[1])
    unsteady = sum(value > SPREAD_LIMIT for _, value in rows)
    if unsteady > len(rows) // 4:
        reasons.append(
            f"{unsteady} of {len(rows)} ceilings were unsteady, {where} most ({spread:.0%} between quartiles)"
        )
    return "; ".join(reasons)


def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The higher ceiling of two measurements, row by row, and the lower call overhead: load only ever slows down."""
    for rows, keys in (("bandwidths", ("read_gbps", "write_gbps", "copy_gbps")), ("flops", ("gflops",))):
        for old, new in zip(a[rows], b[rows], strict=True):
            if new[keys[0]] > old[keys[0]]:
                old["kernel"], old["relative_spread"] = new["kernel"], new["relative_spread"]
            old.update({key: max(old[key], new[key]) for key in keys})
    a["call_overhead_us"] = min(a["call_overhead_us"], b["call_overhead_us"])
    return a


def measure(library: str, cap_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure until a measurement is quiet or `cap_s` seconds are over.

    Returns:
        `bandwidths`, `flops` (rows of the Target record, the best over all attempts), `call_overhead_us`, `noise`
        (empty when the last attempt was quiet, else the shortest account of why one was not) and `attempts`.
    """
    import torch  # noqa: F401 - before the clock starts

    end = time.perf_counter() + cap_s
    cpus = cpus_spread()
    kernels = Kernels(library, cpus)
    result: dict[str, Any] | None = None
    reasons: list[str] = []
    while True:
        start = time.perf_counter()
        while idle_share(cpus, 0.2) < 1 - FOREIGN_LIMIT and time.perf_counter() < start + min(1.5, cap_s / 10):
            say("waiting for other processes to calm down")
        budget_s = min(6.0, (end - time.perf_counter()) * 0.8)
        before, own, at = psutil.cpu_times(percpu=True), _own_cpu_s(), time.perf_counter()
        once = measure_once(kernels, len(cpus), budget_s, say)
        foreign, steal = _others(before, own, time.perf_counter() - at, cpus)
        reasons.append(noise(once, foreign, steal))
        result = once if result is None else merge(result, once)
        took = time.perf_counter() - start
        if not reasons[-1] or end - time.perf_counter() < took * 1.1:
            break
        say(f"measuring again: {reasons[-1]}")
    worst = "" if not reasons[-1] else min(reasons, key=len)
    return {**result, "noise": worst, "attempts": len(reasons)}


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _others(before: list[Any], own_s: float, wall_s: float, cpus: tuple[int, ...]) -> tuple[float, float]:
    """(share of these CPUs' time that other processes used, share that was stolen) since `before`."""
    after = psutil.cpu_times(percpu=True)

    def spent(name: str) -> float:
        return sum(getattr(after[i], name, 0.0) - getattr(before[i], name, 0.0) for i in cpus if i < len(after))

    # guest time is part of user time in Linux's table
    busy = sum(spent(name) for name in ("user", "nice", "system", "irq", "softirq"))
    total = wall_s * len(cpus)
    return max(0.0, (busy - (_own_cpu_s() - own_s)) / total), max(0.0, spent("steal") / total)


def main() -> None:
    """Entry of the child."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    config = json.loads(sys.argv[1])

    def say(text: str) -> None:
        print(json.dumps({"progress": text}), flush=True)

    print(json.dumps({"result": measure(config["library"], config["cap_s"], say)}), flush=True)


if __name__ == "__main__":
    main()
