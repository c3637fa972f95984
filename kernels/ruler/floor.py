"""Physics as a gate: the least time that any implementation can take on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.ruler.spec import Problem, Shape


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at most for one working set and thread count. Gigabytes and GFLOP are 1e9."""

    read_gbps: float
    write_gbps: float
    gflops: Mapping[str, float]
    """Dense GFLOP/s by dtype name."""
    margin: float = 0.10
    """How much faster than the ceilings a kernel may be before it is called impossible (0.10: ten per cent)."""
    trusted: bool = True
    """False when the ceilings were measured on a noisy machine: no floor is then enforced, and the verdict says so."""
    name: str = ""


def cost(problem: Problem, shape: Shape) -> tuple[float, float, float]:
    """(operations, bytes read, bytes written) of the problem's cost model at `shape`.

    Raises:
        ValueError: an expression is not arithmetic over the axes, or gives a negative or non-finite number.
    """
    axes = problem.axis_values(shape)
    figures = []
    for text in (problem.cost.flops, problem.cost.bytes_read, problem.cost.bytes_written):
        try:
            value = float(eval(text, {"__builtins__": {}}, {**axes, "max": max, "min": min}))
        except Exception as error:
            raise ValueError(f"cost expression {text!r} of problem {problem.name}: {error}") from error
        if not 0 <= value < float("inf"):
            raise ValueError(f"cost expression {text!r} of problem {problem.name} gives {value}")
        figures.append(value)
    return figures[0], figures[1], figures[2]


def floor_s(problem: Problem, shape: Shape, ceilings: Ceilings | None) -> float | None:
    """Seconds below which no call can honestly end; None when there are no trusted ceilings.

    The larger of the time for the bytes (reads and writes may overlap) and the time for the operations; a dtype
    without a ceiling does not bound.
    """
    if ceilings is None or not ceilings.trusted:
        return None
    flops, read, written = cost(problem, shape)
    times = [read / (ceilings.read_gbps * 1e9), written / (ceilings.write_gbps * 1e9)]
    peak = ceilings.gflops.get(problem.cost.dtype)
    if peak:
        times.append(flops / (peak * 1e9))
    return max(times)
