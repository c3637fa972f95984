"""Is a problem fit to judge by? Wrong answers that cost nothing must fail on it, and every input must matter."""

from __future__ import annotations

import os
from typing import Any

import torch

from kernels.errors import InputError
from kernels.ruler import compare, inputs
from kernels.ruler.spec import Problem


def check(problem: Problem) -> None:
    """Try zeros, a constant, a row for all rows, an input and a bfloat16 version as outputs; change each input.

    Raises:
        InputError: one of them would pass, the reference fails, or a shape does not fit memory; says which.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 62
    for one in problem.visible:
        plan = inputs.layout(problem, one, 1)
        needed = 24 * (plan.input_bytes + plan.output_bytes)  # float64 references, their intermediates, both workers
        if needed > free:
            raise InputError(
                f"Shape {dict(one)} needs {needed / 2**30:.1f} GiB to be judged, {free / 2**30:.1f} GiB are free.",
                remedy="Use a smaller shape.", file=problem.name, key="visible",
            )  # fmt: skip
    shape = min(problem.visible, key=lambda s: inputs.layout(problem, s, 1).input_bytes)
    axes = problem.axis_values(shape)
    rng = inputs.generator(b"pretest", problem.id)
    scalars = inputs.scalars(problem, None)

    def draw(index: int) -> Any:
        tensor = problem.inputs[index]
        if tensor.shape is None:
            return scalars[index]
        size = tuple(axes[name] for name in tensor.shape)
        return inputs.values(tensor, size, "normal", rng, axes).to(inputs.torch_dtype(tensor.dtype))

    arguments = [draw(i) for i in range(len(problem.inputs))]
    try:
        reference = compare.load_reference(problem.reference)
        expected = compare.expect(problem, reference, arguments, compare.summed(problem, axes), 1)
    except Exception as error:
        raise InputError(
            f"The reference fails at shape {dict(shape)}: {error}.", remedy="Mend it, or the shapes.",
            file=problem.name, key="reference",
        ) from error  # fmt: skip
    if len(expected) != len(problem.outputs):
        _refuse(problem, f"The reference gives {len(expected)} outputs, the problem says {len(problem.outputs)}.")
    for name in ("zeros", "a constant", "one row for all", "an input", "a bfloat16 version"):
        wrong = [_cheap(name, what, arguments) for what in expected]
        if all(w is not None and compare.error_of(w, what)[1] is None for w, what in zip(wrong, expected, strict=True)):
            _refuse(problem, f"It cannot tell right results from {name}.")
    for index, tensor in enumerate(problem.inputs):
        if tensor.shape is None:
            continue
        changed = [*arguments[:index], draw(index), *arguments[index + 1 :]]
        with torch.no_grad():
            moved = compare.outputs_of(reference(*[a.clone() if isinstance(a, torch.Tensor) else a for a in changed]))
        if all(compare.error_of(m, what)[1] is None for m, what in zip(moved, expected, strict=True)):
            _refuse(problem, f"The input {tensor.name} does not change the result.")


def _cheap(name: str, what: compare.Expected, arguments: list[Any]) -> torch.Tensor | None:
    truth, natural = what.truth, what.natural
    if name == "zeros":
        return torch.zeros_like(natural)
    if name == "a constant":
        return torch.full_like(natural, float(truth.double().mean())) if truth.numel() > 1 else None
    if name == "one row for all":
        return natural[:1].expand_as(natural) if natural.dim() > 1 and natural.shape[0] > 1 else None
    if name == "an input":
        like = [a for a in arguments if isinstance(a, torch.Tensor) and a.shape == natural.shape]
        return like[0].to(natural.dtype) if like else None
    return natural.bfloat16().to(natural.dtype) if natural.dtype in (torch.float32, torch.float64) else None


def _refuse(problem: Problem, text: str) -> None:
    raise InputError(text, remedy="Give it other shapes, inputs or outputs.", file=problem.name, key="reference")
