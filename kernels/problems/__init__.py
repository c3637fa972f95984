"""Problems: what a kernel has to do, at which shapes, and what physics demands of it.

`build` makes one from an operator and axis values, `by_name` gives four float32 problems that every machine can judge,
`load` reads KernelBench files and FlashInfer-Trace Definitions.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kernels.errors import InputError
from kernels.problems.hidden import hidden_shapes
from kernels.problems.named import NAMED
from kernels.problems.operators import OPERATORS, VALUE, Operator
from kernels.ruler.spec import Cost, Problem, Shape, Tensor

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

NAMES = tuple(NAMED)
"""Names that `by_name` knows."""


def build(
    operator: str,
    *,
    dtype: str = "bfloat16",
    visible: Sequence[Shape] = (),
    name: str | None = None,
    scalars: Mapping[str, float | int] | None = None,
    seed: int | None = None,
    **axes: int,
) -> Problem:
    """A problem for `operator`. Axes given here are constants; the rest vary and need values in `visible`.

    Args:
        operator: a key of `kernels.problems.operators.OPERATORS`.
        dtype: dtype of tensors: float32, bfloat16, float16 or float64.
        visible: shapes of the variable axes, the one that counts most first.
        name: defaults to operator, constants and dtype: `linear_n576_k576_bfloat16`.
        scalars: values of scalar inputs (`eps`) at visible shapes.
        seed: draws the hidden shapes; None takes a secret one. The problem's id does not depend on it.
        **axes: sizes of the constant axes (`n=576, k=576`).

    Raises:
        InputError: unknown operator, axis or dtype, a size below 1, or a variable axis without a value.
    """
    spec = OPERATORS.get(operator)
    if spec is None:
        raise _unknown("operator", operator, OPERATORS)
    if dtype not in _BYTES:
        raise _unknown("dtype", dtype, _BYTES)
    for axis in axes:
        if axis not in spec.axes:
            raise _unknown(f"axis of {operator}", axis, spec.axes)
    variable = tuple(axis for axis in spec.axes if axis not in axes)
    shapes = _checked(operator, spec, axes, variable, visible)
    for scalar in scalars or {}:
        if scalar not in spec.scalars:
            raise _unknown(f"scalar of {operator}", scalar, spec.scalars)
    constants = "_".join(f"{axis}{value}" for axis, value in axes.items())
    return Problem(
        name=name or "_".join(part for part in (operator, constants, dtype) if part),
        operator=operator,
        axes={axis: axes.get(axis) for axis in spec.axes},
        inputs=tuple(_typed(tensor, dtype) for tensor in spec.inputs),
        outputs=tuple(_typed(tensor, dtype) for tensor in spec.outputs),
        reference=spec.reference,
        cost=_priced(spec.cost, dtype),
        visible=shapes,
        hidden=hidden_shapes(shapes, variable, seed=secrets.randbits(64) if seed is None else seed),
        scalars=dict(spec.scalars) | dict(scalars or {}),
        reduction_axes=spec.reduction_axes,
        regimes=spec.regimes,
        vendor=spec.vendor,
        description=spec.description,
    )


def by_name(name: str, *, seed: int | None = None) -> Problem:
    """One of the four float32 problems `rmsnorm`, `softmax`, `matmul`, `silu_mul`; every axis varies.

    Raises:
        InputError: another name.
    """
    if name not in NAMED:
        raise _unknown("problem", name, NAMED)
    return with_visible(NAMED[name], NAMED[name].visible, seed=seed)


def load(path_or_name: str | Path, *, seed: int | None = None) -> Problem:
    """A problem by name, from a KernelBench file (`.py`) or a FlashInfer-Trace Definition (`.json`).

    Raises:
        InputError: no such name or file, another kind of file, or one that lacks what a problem needs.
    """
    if str(path_or_name) in NAMED:
        return by_name(str(path_or_name), seed=seed)
    path = Path(path_or_name)
    if not path.is_file():
        close = difflib.get_close_matches(str(path_or_name), NAMED, 1)
        hint = f": did you mean {close[0]!r}?" if close else "."
        raise InputError(
            f"There is no problem of this name and no file at this path{hint}",
            remedy=f"Names: {', '.join(NAMED)}; files: KernelBench .py, FlashInfer-Trace .json.",
            file=path_or_name,
        )
    if path.suffix == ".json":
        from kernels.problems import flashinfer

        return flashinfer.load_definition(path, seed=seed)
    if path.suffix == ".py":
        from kernels.problems import kernelbench

        return kernelbench.load(path)
    raise InputError("This kind of file is not read as a problem.", remedy="Give a .py or .json file.", file=path)


def with_visible(problem: Problem, visible: Sequence[Shape], *, seed: int | None = None) -> Problem:
    """The same problem at other shapes, with hidden ones drawn to match.

    Raises:
        InputError: a variable axis lacks a value.
    """
    variable = tuple(axis for axis, value in problem.axes.items() if value is None)
    shapes = _complete(problem.name, variable, visible)
    drawn = hidden_shapes(shapes, variable, seed=secrets.randbits(64) if seed is None else seed)
    return replace(problem, visible=shapes, hidden=drawn)


def _checked(
    operator: str, spec: Operator, axes: Mapping[str, int], variable: tuple[str, ...], visible: Sequence[Shape]
) -> tuple[Shape, ...]:
    for axis, value in axes.items():
        if value < 1:
            raise InputError(f"The axis is {value}.", remedy="Sizes start at 1.", key=f"{operator}.{axis}")
    for shape in visible:
        for axis in shape:
            if axis not in spec.axes:
                raise _unknown(f"axis of {operator}", axis, spec.axes)
    return _complete(operator, variable, visible)


def _complete(what: str, variable: Sequence[str], visible: Sequence[Shape]) -> tuple[Shape, ...]:
    if not visible and variable:
        raise InputError(
            f"No shape gives values to {', '.join(variable)}.", remedy="Pass visible=[{axis: size}].", key=what
        )
    for shape in visible:
        for axis in variable:
            if shape.get(axis, 0) < 1:
                raise InputError(
                    f"A visible shape lacks a size of at least 1: {dict(shape)}.",
                    remedy="Every variable axis needs a size in every shape.",
                    key=f"{what}.{axis}",
                )
    return tuple({axis: shape[axis] for axis in variable} for shape in visible) or ({},)


def _typed(tensor: Tensor, dtype: str) -> Tensor:
    return replace(tensor, dtype=dtype) if tensor.dtype == VALUE else tensor


def _priced(cost: Cost, dtype: str) -> Cost:
    size = str(_BYTES[dtype])
    return Cost(
        flops=cost.flops,
        bytes_read=cost.bytes_read.replace("B", size),
        bytes_written=cost.bytes_written.replace("B", size),
        dtype=dtype if cost.dtype == VALUE else cost.dtype,
    )


def _unknown(what: str, name: str, known: object) -> InputError:
    names = [str(item) for item in known]  # type: ignore[attr-defined]
    close = difflib.get_close_matches(name, names, 1)
    hint = f": did you mean {close[0]!r}?" if close else "."
    return InputError(f"Unknown {what}{hint}", remedy=f"Known: {', '.join(names)}.", key=name)
