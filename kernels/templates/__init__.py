"""Parameterised C++ kernels that the offline executor tunes, and that agents may start from.

A family is a few files of this folder and a space of parameters. Parameters become `#define`s at the head of the
source, so that a candidate's source is all there is. Wide code uses GCC's vector extensions, which the compiler lowers
to whatever the machine has, and the AVX512_BF16 dot product where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kernels.errors import InputError
from kernels.ruler.spec import Candidate, Problem

Parameters = Mapping[str, Any]

_C_TYPE = {"bfloat16": "bf16", "float32": "float"}


@dataclass(frozen=True)
class Family:
    """One parameterised kernel."""

    name: str
    operator: str
    sources: tuple[str, ...]
    """Files of this folder, in the order in which they are put together."""
    space: Mapping[str, tuple[Any, ...]]
    """Choices by parameter, in an order in which neighbours are alike."""
    default: Parameters
    """Good everywhere: the first to be tried."""
    dtypes: tuple[str, ...]
    prepares: bool = False
    constants: tuple[str, ...] = ()
    """Constant axes that the source wants as `#define`s in capitals."""
    fits: Callable[[Mapping[str, int]], bool] = lambda constants: True
    """Whether the kernel works at these values of the constant axes."""

    def supported(self, problem: Problem) -> bool:
        """Whether this kernel solves `problem`: its operator, one floating dtype and constants that the kernel has."""
        dtypes = {
            tensor.dtype
            for tensor in (*problem.inputs, *problem.outputs)
            if tensor.shape is not None and "float" in tensor.dtype
        }
        constants = {axis: value for axis, value in problem.axes.items() if value is not None}
        return (
            problem.operator == self.operator
            and len(dtypes) == 1
            and dtypes <= set(self.dtypes)
            and set(self.constants) <= set(constants)
            and self.fits(constants)
        )

    def legal(self, parameters: Parameters) -> bool:
        """Whether `parameters` is a point of the space."""
        return set(parameters) == set(self.space) and all(parameters[key] in self.space[key] for key in self.space)

    def render(self, parameters: Parameters, problem: Problem) -> Candidate:
        """The candidate for `problem` at `parameters`.

        Raises:
            InputError: a point outside the space, or a problem that is not supported.
        """
        if not self.supported(problem):
            raise InputError(
                f"Template {self.name} does not solve it.", remedy="See Family.supported.", key=problem.name
            )
        for key in {*parameters, *self.space}:
            if key not in self.space or parameters.get(key) not in self.space[key]:
                raise InputError(
                    f"Template {self.name} has no value {parameters.get(key)!r} here.",
                    remedy=f"Choices: {self.space.get(key, tuple(self.space))}.",
                    key=key,
                )
        dtype = next(tensor.dtype for tensor in problem.inputs if tensor.shape is not None)
        defines = [f"#define ELEMENT {_C_TYPE[dtype]}", f"#define TEAM {_team(parameters)}"]
        defines += [f"#define {axis.upper()} {problem.axes[axis]}" for axis in self.constants]
        defines += [f"#define {key.upper()} {parameters[key]}" for key in self.space if key != "threads"]
        body = "\n".join(files("kernels.templates").joinpath(source).read_text("utf-8") for source in self.sources)
        return Candidate(
            language="cpp",
            source="\n".join(defines) + "\n" + body,
            entry=f"run_{self.operator}",
            prepares=self.prepares,
            parameters=dict(parameters),
            origin=f"template:{self.name}",
        )

    def neighbours(self, parameters: Parameters) -> Iterator[dict[str, Any]]:
        """Points that differ from `parameters` by one step of one parameter."""
        for key, choices in self.space.items():
            place = choices.index(parameters[key])
            for step in (place - 1, place + 1):
                if 0 <= step < len(choices):
                    yield {**parameters, key: choices[step]}


def families(operator: str) -> tuple[Family, ...]:
    """The templates for `operator`, the most promising first; none for an operator without one."""
    return tuple(family for family in FAMILIES if family.operator == operator)


def family(name: str) -> Family:
    """The template called `name`.

    Raises:
        InputError: there is none.
    """
    for known in FAMILIES:
        if known.name == name:
            return known
    raise InputError("Unknown template.", remedy=f"Known: {', '.join(f.name for f in FAMILIES)}.", key=name)


def _team(parameters: Parameters) -> str:
    return "num_threads(1)" if parameters.get("threads") == 1 else ""


_TEAM = {"threads": ("all", 1)}
_GEMM = {
    "columns": (16, 32, 48, 64),
    "rows": (4, 6, 8, 12),
    "k_unroll": (1, 2, 4, 8),
    "prefetch_bytes": (0, 512, 1024, 2048, 4096),
    "row_chunk": (48, 96, 192, 384),
    "schedule": ("static", "dynamic"),
}
# 32 columns × 12 rows fill 24 of the 32 AVX-512 registers with sums; the hardware prefetches a packed stream by itself.
_GEMM_DEFAULT = {
    "columns": 32,
    "rows": 12,
    "k_unroll": 4,
    "prefetch_bytes": 0,
    "row_chunk": 192,
    "schedule": "static",
}
_FROM = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 62)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="linear_bf16",
        operator="linear",
        sources=("common.h", "gemm.h", "linear_bf16.cpp"),
        space=_GEMM | _TEAM,
        default=_GEMM_DEFAULT | {"threads": "all"},
        dtypes=("bfloat16",),
        prepares=True,
    ),
    Family(
        name="mlp_bf16",
        operator="mlp",
        sources=("common.h", "gemm.h", "mlp_bf16.cpp"),
        space=_GEMM | _TEAM,
        default=_GEMM_DEFAULT | {"threads": "all"},
        dtypes=("bfloat16",),
        prepares=True,
    ),
    Family(
        name="rmsnorm_linear_bf16",
        operator="rmsnorm_linear",
        sources=("common.h", "gemm.h", "norm.h", "rmsnorm_linear_bf16.cpp"),
        space=_GEMM | {"norm_unroll": (1, 2, 4)} | _TEAM,
        default=_GEMM_DEFAULT | {"norm_unroll": 4, "threads": "all"},
        dtypes=("bfloat16",),
        prepares=True,
    ),
    Family(
        name="attention_decode_bf16",
        operator="attention_decode",
        sources=("common.h", "attention_decode_bf16.cpp"),
        space={
            "positions": (32, 64, 128, 256, 512),
            "queries": (1, 2, 3, 4, 6, 8),
            "unroll": (1, 2, 4),
            "prefetch_bytes": (0, 512, 1024, 2048, 4096),
            "fetch_ahead": (0, 1),
            "split": (1, 2, 4),
            "schedule": ("static", "dynamic"),
        } | _TEAM,
        # Sequences differ in length; 3 query heads of 64 elements have their 12 vectors of sums in registers.
        default={
            "positions": 64, "queries": 3, "unroll": 2, "prefetch_bytes": 0, "fetch_ahead": 1, "split": 1,
            "schedule": "dynamic", "threads": "all",
        },
        dtypes=("bfloat16",),
        constants=("heads", "kv_heads", "dim"),
        fits=lambda axes: axes["heads"] % axes["kv_heads"] == 0,
    ),
    Family(
        name="rmsnorm",
        operator="rmsnorm",
        sources=("common.h", "norm.h", "rmsnorm.cpp"),
        space={"norm_unroll": (1, 2, 4, 8), "parallel_from": _FROM} | _TEAM,
        default={"norm_unroll": 4, "parallel_from": 1 << 16, "threads": "all"},
        dtypes=("bfloat16", "float32"),
    ),
    Family(
        name="silu_mul",
        operator="silu_mul",
        sources=("common.h", "silu_mul.cpp"),
        space={"unroll": (1, 2, 4), "block": (512, 2048, 8192, 32768), "parallel_from": _FROM} | _TEAM,
        default={"unroll": 2, "block": 2048, "parallel_from": 1 << 14, "threads": "all"},
        dtypes=("bfloat16", "float32"),
    ),
    Family(
        name="softmax",
        operator="softmax",
        sources=("common.h", "softmax.cpp"),
        space={"parallel_from": _FROM, "schedule": ("static", "dynamic")} | _TEAM,
        default={"parallel_from": 1 << 14, "schedule": "static", "threads": "all"},
        dtypes=("bfloat16", "float32"),
    ),
    Family(
        name="matmul_f32",
        operator="matmul",
        sources=("common.h", "matmul_f32.cpp"),
        space={"columns": (16, 32, 64), "rows": (4, 6, 8, 12), "parallel_from": _FROM} | _TEAM
        | {"schedule": ("static", "dynamic")},
        default={"columns": 32, "rows": 12, "parallel_from": 1 << 16, "threads": "all", "schedule": "static"},
        dtypes=("float32",),
    ),
)  # fmt: skip
