"""The roofline: how fast physics lets an operator be on a target, how far it is from that, and the picture of it.

Time at the roofline is the larger of bytes over bandwidth and operations over FLOP/s (Williams et al., 2009). Reads and
writes share the bus of main memory, so their times add up there.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kernels.ruler.floor import Ceilings
from profiles.target import Bandwidth, Target

ALIASES = {"float64": ("float32",), "float16": ("bfloat16", "float32"), "uint8": ("int8",), "int32": ("float32",)}
"""Where a dtype was not measured, the first of these that was bounds it."""


@dataclass(frozen=True)
class Bound:
    """What bounds an operator."""

    time_s: float
    """Seconds at the roofline: the larger of `memory_s` and `compute_s`."""
    bound: Literal["memory", "compute", "overhead"]
    """`overhead` where one call of an operator takes longer than both: only fusing helps."""
    ceiling_gbps: float
    """Bytes moved per second at the ceiling, 1e9 per second."""
    ceiling_gflops: float
    memory_s: float
    compute_s: float
    overhead_s: float

    @property
    def reachable_s(self) -> float:
        """Seconds that a kernel called on its own can reach: the roofline, or one call's overhead."""
        return max(self.time_s, self.overhead_s)


def bound(  # noqa: PLR0917 - three costs and three conditions, in the order of a sentence
    flops: float,
    bytes_read: float,
    bytes_written: float,
    dtype: str,
    target: Target,
    threads: int,
    *,
    working_set_bytes: float | None = None,
) -> Bound:
    """Time at the roofline of one call and what sets it.

    Args:
        flops: multiplications plus additions.
        bytes_read: bytes that must come from memory.
        bytes_written: bytes that must go to memory.
        dtype: of the arithmetic.
        target: measured or datasheet ceilings.
        threads: threads that work on it.
        working_set_bytes: everything that is touched again and again; main memory is assumed when it is not given, as a
            model's weights are too large for caches.

    Raises:
        ValueError: a negative or non-finite figure.
    """
    if not all(math.isfinite(x) and x >= 0 for x in (flops, bytes_read, bytes_written)):
        raise ValueError(f"not a cost: {flops} operations, {bytes_read} bytes read, {bytes_written} written")
    level = _level(target, threads, working_set_bytes)
    read, write = level.read_gbps, level.write_gbps or level.read_gbps
    memory_s = bytes_read / (read * 1e9) + bytes_written / (write * 1e9)
    gflops = peak(target, dtype, threads)
    compute_s = flops / (gflops * 1e9) if gflops else 0.0
    time_s, overhead_s = max(memory_s, compute_s), target.call_overhead_us * 1e-6
    total = bytes_read + bytes_written
    kind: Literal["memory", "compute", "overhead"] = "memory" if memory_s >= compute_s else "compute"
    return Bound(
        time_s=time_s,
        bound="overhead" if overhead_s > time_s else kind,
        ceiling_gbps=total / memory_s / 1e9 if memory_s else read,
        ceiling_gflops=gflops or 0.0,
        memory_s=memory_s,
        compute_s=compute_s,
        overhead_s=overhead_s,
    )


def ceilings(target: Target, threads: int, working_set_bytes: float) -> Ceilings:
    """The ruler's ceilings for a working set that may be as warm as caches allow.

    What fits into a cache may be read at that cache's speed, even where the rest must come from memory, so the ceiling
    of a larger working set lies between the two: time = cached part / cache + rest / memory. A cache whose speed nobody
    published costs nothing; if everything fits there, no floor is known and the ceilings are not trusted.
    """
    name = f"{target.name}, {threads} threads, {working_set_bytes:.3g} bytes"
    rest = working_set_bytes - target.cache_bytes
    gflops = {f.dtype: g for f in target.flops if (g := peak(target, f.dtype, threads))}
    gflops |= {dtype: g for dtype in ALIASES if (g := peak(target, dtype, threads))}
    if rest <= 0 and target.cache_bytes:
        name += ": inside caches of unknown speed"
        fastest = max(b.read_gbps for b in target.bandwidths)
        return Ceilings(fastest, fastest, gflops, target.margin, trusted=False, name=name)

    def speed(way: str) -> float:
        """Mean GB/s over the working set, filled from the smallest cache up."""
        seconds, left, best = 0.0, max(rest, 1.0), 0.0
        levels = sorted(_levels(target, threads), key=lambda b: b.capacity_bytes or math.inf)
        for i, level in enumerate(levels):
            # half of what a copy moves is read and half written: it may show more than either way alone; and what an
            # outer level gives, an inner one gives too
            gbps = max(max(getattr(b, f"{way}_gbps") or b.read_gbps, (b.copy_gbps or 0.0) / 2) for b in levels[i:])
            part = min(left, level.capacity_bytes or left)
            seconds, left, best = seconds + part / (gbps * 1e9), left - part, gbps
            if left <= 0:
                break
        seconds += left / (best * 1e9)  # nothing beyond the last level that we know
        return working_set_bytes / seconds / 1e9 if working_set_bytes > 0 else best

    return Ceilings(speed("read"), speed("write"), gflops, target.margin, trusted=not target.noisy, name=name)


def peak(target: Target, dtype: str, threads: int) -> float | None:
    """GFLOP/s of that dtype at that many threads; None when nothing bounds it.

    Between measured thread counts the next higher one counts. float16 and bfloat16 may be computed in float32, so they
    are never slower than it.
    """
    dtypes = (dtype, "float32") if dtype in ("bfloat16", "float16") else (dtype,)
    found = [g for d in dtypes if (g := _peak(target, d, threads))]
    if not found:
        found = [g for d in ALIASES.get(dtype, ()) if (g := _peak(target, d, threads))][:1]
    return max(found, default=None)


def intensity(flops: float, bytes_moved: float) -> float:
    """Arithmetic intensity: operations per byte moved; infinite when nothing is moved."""
    return flops / bytes_moved if bytes_moved else math.inf


def gap(measured_s: float, roofline_s: float) -> float:
    """Measured time over time at the roofline, at least 1; infinite when the roofline is at zero."""
    return max(1.0, measured_s / roofline_s) if roofline_s > 0 else math.inf


def amdahl_limit(time_share: float, speedup: float = math.inf) -> float:
    """Speed-up of the whole when `time_share` of its time becomes `speedup` times faster (Amdahl, 1967).

    Raises:
        ValueError: a share outside 0 to 1, or a speed-up that is not positive.
    """
    if not 0 <= time_share <= 1 or not speedup > 0:
        raise ValueError(f"no Amdahl limit for a share of {time_share} and a speed-up of {speedup}")
    rest = 1 - time_share + time_share / speedup
    return 1 / rest if rest > 0 else math.inf


@dataclass(frozen=True)
class Point:
    """One operator in the picture."""

    label: str
    flops: float
    """Operations of one call."""
    bytes_moved: float
    measured_s: float
    time_share: float
    """0 to 1; the area of the marker."""


def roofline_figure(
    points: Sequence[Point], target: Target, threads: int, *, dtype: str = "bfloat16", title: str = ""
) -> bytes:
    """PNG of the roofline, log-log: a slope per memory level, a roof per dtype, an operator per labelled marker.

    The legend stands beside the plot. The most expensive operators are numbered in it, so that labels never collide.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawable = (p for p in points if p.flops > 0 and p.bytes_moved > 0 and p.measured_s > 0)
    shown = sorted(drawable, key=lambda p: -p.time_share)[:12]
    levels = _levels(target, threads)
    roofs = {d: g for d in dict.fromkeys((dtype, "float32")) if (g := peak(target, d, threads))}
    top = max(roofs.values(), default=1.0)
    memory = max(levels, key=lambda b: b.capacity_bytes or math.inf)
    xs = [intensity(p.flops, p.bytes_moved) for p in shown] + [top / memory.read_gbps]
    ys = [p.flops / p.measured_s / 1e9 for p in shown] + [top]
    left, right = min(xs) / 3, max(xs) * 4
    figure = Figure(figsize=(9.5, 5.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = ("#1b6ca8", "#3a9d6e", "#c98a1b", "#8c5aa8")
    for level, colour in zip(sorted(levels, key=lambda b: b.read_gbps), colours, strict=False):
        ridge = top / level.read_gbps
        main = level is memory
        axes.plot(
            [left, min(ridge, right)],
            [left * level.read_gbps, min(ridge, right) * level.read_gbps],
            color=colour,
            linewidth=2.0 if main else 1.0,
            linestyle="-" if main else "--",
            label=f"{level.level}: {level.read_gbps:,.0f} GB/s",
        )
    for (name, gflops), style in zip(roofs.items(), ("-", ":"), strict=False):
        start = gflops / max(b.read_gbps for b in levels)
        label = f"{name}: {gflops:,.0f} GFLOP/s"
        axes.plot([max(left, start), right], [gflops] * 2, color="#333333", linestyle=style, label=label)
    for number, p in enumerate(shown, 1):
        x, y = intensity(p.flops, p.bytes_moved), p.flops / p.measured_s / 1e9
        axes.scatter(x, y, s=40 + 900 * p.time_share, color="#c0392b", alpha=0.55, edgecolor="#7b241c", zorder=3)
        axes.annotate(str(number), (x, y), ha="center", va="center", fontsize=8, zorder=4)
        axes.plot([], [], " ", label=f"{number}  {p.label} ({p.time_share:.0%} of the time)")
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(ys) / 4, top * 2.5))
    axes.set_xlabel("arithmetic intensity (operations per byte)")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(title or f"{target.device}, {threads} thread{'s' * (threads != 1)}", fontsize=11)
    axes.grid(visible=True, which="major", alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": ""})
    return out.getvalue()


def _levels(target: Target, threads: int) -> list[Bandwidth]:
    """One row per memory level: the one measured at `threads`, else at the next higher count, else at the highest."""
    rows: dict[str, list[Bandwidth]] = {}
    for row in target.bandwidths:
        rows.setdefault(row.level, []).append(row)
    return [_at(group, threads) for group in rows.values()]


def _level(target: Target, threads: int, working_set_bytes: float | None) -> Bandwidth:
    """The fastest level that holds the working set; main memory when it is None."""
    levels = sorted(_levels(target, threads), key=lambda b: b.capacity_bytes or math.inf)
    if working_set_bytes is not None:
        return next((b for b in levels if (b.capacity_bytes or math.inf) >= working_set_bytes), levels[-1])
    return levels[-1]


def _at(rows: Sequence[Bandwidth], threads: int) -> Bandwidth:
    higher = [row for row in rows if row.threads >= threads]
    return min(higher, key=lambda row: row.threads) if higher else max(rows, key=lambda row: row.threads)


def _peak(target: Target, dtype: str, threads: int) -> float | None:
    rows = [f for f in target.flops if f.dtype == dtype]
    higher = [f for f in rows if f.threads >= threads]
    if higher:
        return min(higher, key=lambda f: f.threads).gflops
    return max(rows, key=lambda f: f.threads).gflops if rows else None
