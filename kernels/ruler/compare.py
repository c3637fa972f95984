"""What is right: an error budget from a float64 reference, and `error <= budget`, never `not error > budget`.

Budget of an element, the sum of
* 4 × the error of the reference itself in the problem's own dtype (the larger of this element's and, relative to its
  size, the median of its row),
* (6 + 1.5·√L) × the standard deviation that float32 rounding of the inputs causes (conditioning; from random
  perturbations of one unit in the last place), where L is the number of terms that are summed,
* (16 + the lesser of L and 24·√L) units of float32 rounding (a serial sum of like terms rounds in one direction) and
  one of the output's own dtype, relative to the element,
* 1e-12 of the largest magnitude in its row, and where flushing is allowed four of the smallest normal number, scaled
  by that magnitude if it is above 1.
NaN and infinities must stand exactly where the references (float64 and the problem's dtype) agree that they stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.ruler.spec import Problem

Reference = Callable[..., Any]
_UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def load_reference(source: str) -> Reference:
    """The `run` of a trusted Python source (a problem's reference)."""
    space: dict[str, Any] = {"torch": torch}
    exec(compile(source, "reference.py", "exec"), space)
    return space["run"]


def outputs_of(result: Any) -> list[torch.Tensor]:
    """One tensor or a tuple of them as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


@dataclass(frozen=True)
class Expected:
    """What one output should be: float64 truth, budget, the answers of perturbed references (for integers)."""

    truth: torch.Tensor
    budget: torch.Tensor
    natural: torch.Tensor
    others: tuple[torch.Tensor, ...]


def summed(problem: Problem, axes: dict[str, int]) -> int:
    """How many terms are added up for one output element."""
    return math.prod(axes[name] for name in problem.reduction_axes) if problem.reduction_axes else 1


def expect(problem: Problem, reference: Reference, arguments: Sequence[Any], terms: int, seed: int) -> list[Expected]:
    """Truth and budget for one call. `arguments`: tensors in the problem's dtypes and scalars."""

    def evaluate(convert: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return outputs_of(reference(*[convert(a) if isinstance(a, torch.Tensor) else a for a in arguments]))

    draw = np.random.default_rng(seed)
    unit = 2.0**-50 if any(getattr(a, "dtype", None) is torch.float64 for a in arguments) else 2.0**-24

    def exact(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        bits = np.unpackbits(np.frombuffer(draw.bytes(tensor.numel() // 8 + 1), np.uint8), count=tensor.numel())
        signs = torch.from_numpy(bits).to(tensor.device).double().view(tensor.shape)
        return signs.mul_(2 * unit).add_(1 - unit).mul_(tensor)

    truths, naturals = evaluate(exact), evaluate(lambda tensor: tensor.clone())
    rounded = any(t.dtype in (torch.bfloat16, torch.float16) for t in naturals)  # their spread must be known well
    few = sum(t.numel() for t in truths) < 100_000
    dear = sum(a.numel() for a in arguments if isinstance(a, torch.Tensor)) > 4_000_000
    draws = [evaluate(nudged) for _ in range(((6 if dear else 16) if rounded else 4) if few else 2)]
    return [
        _budget(problem, truth, natural, [d[i] for d in draws], terms=terms, unit=unit)
        for i, (truth, natural) in enumerate(zip(truths, naturals, strict=True))
    ]


def _budget(
    problem: Problem, truth: torch.Tensor, natural: torch.Tensor, draws: list[torch.Tensor], *, terms: int, unit: float
) -> Expected:
    if not truth.is_floating_point():
        return Expected(truth, torch.zeros_like(truth, dtype=torch.float64), natural, (natural, *draws))
    size = truth.abs().nan_to_num(0, 0, 0)
    own = (natural.double() - truth).abs().nan_to_num(0, 0, 0)
    spread = torch.stack([(d - truth).square() for d in draws]).mean(0).sqrt().nan_to_num(0, 0, 0)
    if truth.dim():
        relative = (own / size.clamp_min(1e-300)).median(-1, keepdim=True).values
        own = torch.maximum(own, size * relative)
        spread = torch.maximum(spread, 0.5 * spread.median(-1, keepdim=True).values)
        if problem.reduction_axes and natural.dtype in (torch.bfloat16, torch.float16):
            # Roundings of intermediate results add up to an error that does not shrink where the sum is near zero. It
            # is spread over the elements as the effect of small changes is, and the row's typical ratio of the two
            # sets its size: 2.25 medians are one and a half standard deviations, so that the budget ends at six (a
            # little later where a million elements have a million chances).
            spread = torch.maximum(spread, _separable(spread))
            ratio = (own / spread.clamp_min(1e-300)).masked_fill(size == 0, math.nan)
            reach = 2.25 * max(1.0, math.sqrt(math.log(truth.numel() or 1) / math.log(5000)))
            own = torch.maximum(own, reach * spread * ratio.nanmedian(-1, keepdim=True).values.nan_to_num(0.0))
    largest = size.amax(-1, keepdim=True) if truth.dim() else size
    root = math.sqrt(terms)
    budget = 4 * own + (6 + 1.5 * root) * spread + unit * (16 + min(terms, 24 * root)) * size + 1e-12 * largest
    budget += _UNIT.get(natural.dtype, 2.0**-23) * size
    if problem.denormals == "flush_allowed":
        budget += 4 * root * torch.finfo(torch.float32).tiny * largest.clamp_min(1)  # of each term that is summed
    return Expected(truth, budget, natural, ())


def _separable(spread: torch.Tensor) -> torch.Tensor:
    """Scale of the row times scale of the column: what few draws say badly of one element, they say well of these."""
    if spread.dim() < 2 or min(spread.shape[-2:]) < 4:
        return spread
    square = spread.square()
    rows, columns = square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)
    return (rows * columns / square.mean((-2, -1), keepdim=True).clamp_min(1e-300)).sqrt()


def error_of(got: torch.Tensor, expected: Expected) -> tuple[float, dict[str, Any] | None]:
    """(largest error over budget, the first element that is out of budget or None)."""
    truth, natural = expected.truth, expected.natural
    if not truth.is_floating_point():
        right = got == truth
        for other in expected.others:
            right |= got == other
        return (0.0, None) if bool(right.all()) else (math.inf, _first(~right, got, truth, expected.budget))
    wide = got.double()
    finite = torch.isfinite(truth) & torch.isfinite(natural)
    error = (wide - truth).abs()
    good = error <= expected.budget
    same = torch.where(torch.isnan(truth), torch.isnan(wide), wide == truth)
    agree = torch.where(torch.isnan(truth), torch.isnan(natural), natural.double() == truth)
    good = torch.where(finite, good, same | ~agree)
    worst = torch.where(finite, error / expected.budget.clamp_min(1e-300), 0.0)
    figure = float(worst.max()) if worst.numel() else 0.0
    if bool(good.all()):
        return figure, None
    return (figure if figure > 1 else math.inf), _first(~good, got, truth, expected.budget)


def _first(bad: torch.Tensor, got: torch.Tensor, truth: torch.Tensor, budget: torch.Tensor) -> dict[str, Any]:
    index = tuple(int(i) for i in bad.nonzero()[0])
    return {
        "index": list(index), "got": repr(got[index].item()), "expected": repr(truth[index].item()),
        "allowed": repr(float(budget[index])), "wrong": int(bad.sum()), "of": bad.numel(),
    }  # fmt: skip
