"""What is judged: the problem, the shapes, the candidate. Plain data, known to the ruler and to everyone else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Shape = Mapping[str, int]
"""Values of the variable axes, by axis name: `{"rows": 8}`."""

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool")


@dataclass(frozen=True)
class Tensor:
    """One input or output. `shape` holds axis names; None is a scalar (a Python number, C `float`/`int64_t`)."""

    name: str
    shape: tuple[str, ...] | None
    dtype: str
    constant: bool = False
    """True for a weight: it stays the same over many calls, and a candidate may `prepare` (pack) it beforehand."""
    resident: bool = False
    """True for what stays in memory between two uses and is no weight (a cache of keys and values): like weights, it
    has left the caches by the next use where a model is larger than they are."""
    high: str | None = None
    """Integer inputs are drawn from 0 up to and without this expression over the axes; 8 when there is none."""


@dataclass(frozen=True)
class Cost:
    """Fewest operations and bytes that any implementation must spend, as Python expressions over the axes.

    `bytes_read` counts inputs that must come from memory, `bytes_written` the outputs. Example for a bf16 linear:
    `flops="2*m*n*k"`, `bytes_read="2*(m*k+n*k)"`, `bytes_written="2*m*n"`.
    """

    flops: str
    bytes_read: str
    bytes_written: str
    dtype: str = "float32"
    """The dtype whose FLOP/s ceiling bounds the operations."""


@dataclass(frozen=True)
class Problem:
    """One kernel optimisation problem.

    Conventions for candidates, fixed by the order of `inputs`, `outputs` and `axes`:

    * `cpp`: a C function `run_<operator>(inputs..., outputs..., axes...)`; tensors are pointers to contiguous
      row-major data (bf16 and fp16 as `uint16_t`), scalars `float` or `int64_t`, axes `int64_t`, all axes in the
      order of `axes`, variable and constant ones alike.
    * `torch` and `triton`: a Python function `run(*inputs)` that returns the output (a tuple where there are several).
    * A candidate with `prepares` also defines `prepare_<operator>`. In C:
      `int64_t prepare_<operator>_bytes(axes...)` and
      `void prepare_<operator>(constant inputs..., void* packed, axes...)` (variable axes are passed as 0: packing must
      not depend on them); `run_<operator>` then gets `const void* packed` in the place of the first constant input, and
      the other constant inputs are left out. In Python: `prepare(*constant inputs)` returns an object that takes the
      same place in `run`.
    """

    name: str
    operator: str
    """The family that templates, sites and lessons are keyed by: rmsnorm, linear, silu_mul, mlp, ..."""
    axes: Mapping[str, int | None]
    """Ordered; None for a variable axis, a number for a constant one."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    reference: str
    """Python source of `run(*inputs)` in torch operators; dtype-agnostic, so that float64 inputs give the truth."""
    cost: Cost
    visible: tuple[Shape, ...]
    """Shapes that agents may see; the first is the one that counts most."""
    hidden: tuple[Shape, ...] = ()
    """Shapes that only the ruler sees."""
    scalars: Mapping[str, float | int] = field(default_factory=dict)
    """Values of scalar inputs at visible shapes; hidden cases draw their own."""
    reduction_axes: tuple[str, ...] = ()
    """Axes that are summed over: their product is the accumulation length of the error budget."""
    regimes: tuple[str, ...] = ("normal",)
    """Value regimes of `kernels.ruler.inputs` that are legal for this problem."""
    denormals: str = "flush_allowed"
    """`preserve` or `flush_allowed`."""
    vendor: str | None = None
    """Python source of `run(*inputs)` that calls the vendor's fused operator, when there is one: another baseline."""
    description: str = ""
    c_axes: tuple[str, ...] | None = None
    """What a C function is passed after its outputs in place of all axes: expressions over them, e.g. `rows*cols`."""

    def axis_values(self, shape: Shape) -> dict[str, int]:
        """All axes with their values at `shape`, in the declared order.

        Raises:
            KeyError: `shape` lacks a variable axis.
        """
        return {name: shape[name] if value is None else value for name, value in self.axes.items()}

    def c_values(self, shape: Shape) -> list[int]:
        """The axis arguments of a C function at `shape`, in order."""
        axes = self.axis_values(shape)
        return [int(eval(text, {"__builtins__": {}}, dict(axes))) for text in (self.c_axes or self.axes)]

    @property
    def id(self) -> str:
        """SHA-256 over everything but the hidden shapes and the description."""
        public = {k: v for k, v in asdict(self).items() if k not in ("hidden", "description")}
        return _digest(public)


@dataclass(frozen=True)
class Candidate:
    """Source that claims to solve a problem. Its identity is its content."""

    language: str
    """`cpp`, `torch` or `triton`."""
    source: str
    entry: str
    """The function to call: `run_rmsnorm`, `run`."""
    prepares: bool = False
    parameters: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    """What a template was rendered with. Already in `source`; kept for the knowledge base."""
    origin: str = ""
    """Who made it: `template:linear_bf16`, `agent:claude`, `file:…`."""

    @property
    def id(self) -> str:
        """SHA-256 over language, source, entry and `prepares`."""
        return _digest(
            {"language": self.language, "source": self.source, "entry": self.entry, "prepares": self.prepares}
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=dict).encode()).hexdigest()
