"""One site's call: the candidate where it was judged, the stock path everywhere else, and a count of both."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kernels.ruler.spec import Problem

MIN_ALIGNMENT_BYTES = 4
"""The ruler moves inputs by 4 bytes; a tensor that starts at an odder address was never judged, so it is copied."""


@dataclass
class Tally:
    """How often a candidate was taken and its sites fell back. Counts calls, not tokens."""

    taken: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def fall_back(self, reason: str) -> None:
        """Count one call that took the stock path for `reason`."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def reset(self) -> None:
        """Start at zero."""
        self.taken = 0
        self.reasons.clear()


class Weight(NamedTuple):
    """A parameter as it was at install. Another tensor, other storage or an in-place change makes the packing stale."""

    owner: dict[str, Any]
    """The module's `_parameters`: read directly, since `module.weight` costs a microsecond."""
    key: str
    tensor: torch.Tensor
    pointer: int
    version: int | None
    """None for an inference tensor, which has no version."""

    @classmethod
    def of(cls, module: torch.nn.Module, key: str) -> Weight:
        """Remember parameter `key` of `module`."""
        tensor = module._parameters[key]
        assert tensor is not None
        version = None if tensor.is_inference() else tensor._version
        return cls(module._parameters, key, tensor, tensor.data_ptr(), version)

    def stale(self) -> bool:
        """Whether the module no longer computes with the tensor that was packed."""
        tensor = self.owner[self.key]
        return (
            tensor is not self.tensor
            or tensor.data_ptr() != self.pointer
            or (self.version is not None and tensor._version != self.version)
        )


class Coverage:
    """For which shapes a verdict holds, and what they mean in the model's tensors.

    Leading dimensions of the model's tensors are one axis of the problem's: `[batch, tokens, hidden]` is `[m, k]`.
    """

    def __init__(self, problem: Problem, judged: Sequence[dict[str, int]]) -> None:
        self.problem = problem
        self.activations = [t for t in problem.inputs if t.shape is not None and not t.constant]
        self.output = problem.outputs[0]
        self.variable = [name for name, value in problem.axes.items() if value is None]
        shapes = [*problem.visible, *problem.hidden]
        self.exact = {tuple(shape[name] for name in self.variable) for shape in judged}
        self.low = {name: min(s[name] for s in shapes) for name in self.variable}
        self.high = {name: max(s[name] for s in shapes) for name in self.variable}

    def smallest(self) -> dict[str, int]:
        """The cheapest judged shape."""
        if self.exact:
            return dict(zip(self.variable, min(self.exact, key=math.prod), strict=True))
        return dict(min(self.problem.visible, key=lambda s: math.prod(s[name] for name in self.variable)))

    def bind(self, shapes: Sequence[Sequence[int]]) -> dict[str, int] | str:
        """All axes for activations of these shapes, or the reason why they were not judged."""
        axes = {name: value for name, value in self.problem.axes.items() if value is not None}
        for tensor, shape in zip(self.activations, shapes, strict=True):
            assert tensor.shape is not None
            inner = len(tensor.shape) - 1
            if len(shape) < inner + 1:
                return "shape"
            sizes = (math.prod(shape[: len(shape) - inner]), *shape[len(shape) - inner :])
            for name, size in zip(tensor.shape, sizes, strict=True):
                if axes.setdefault(name, size) != size:
                    return "shape"
        if any(axes.get(name, 0) < 1 for name in self.variable):
            return "empty"
        if self.exact:
            judged = tuple(axes[name] for name in self.variable) in self.exact
        else:
            judged = all(self.low[name] <= axes[name] <= self.high[name] for name in self.variable)
        return axes if judged else "shape"


class Plan(NamedTuple):
    """What to do for one combination of input shapes."""

    reason: str | None
    """Why the stock path is taken, or None."""
    views: tuple[tuple[int, ...], ...] = ()
    """Shapes in which the candidate gets the activations."""
    result: tuple[int, ...] = ()
    """Shape in which the model gets the output."""


class Call:
    """A callable on the model's activations. `run` returns None where the stock path has to be taken.

    Args:
        kernel: the loaded candidate.
        arguments: the candidate's inputs; None where an activation goes.
        stock: the function that is replaced, on the same activations.
        weights: the parameters that `arguments` were made from.
    """

    def __init__(
        self,
        *,
        kernel: Callable[..., Any],
        arguments: Sequence[Any],
        coverage: Coverage,
        stock: Callable[..., torch.Tensor],
        weights: Sequence[Weight],
        tally: Tally,
    ) -> None:
        self.kernel = kernel
        self.arguments = list(arguments)
        self.slots = [i for i, argument in enumerate(arguments) if argument is None]
        self.coverage = coverage
        self.stock = stock
        self.weights = tuple(weights)
        self.tally = tally
        self.dtypes = tuple(getattr(torch, t.dtype) for t in coverage.activations)
        self.plans: dict[tuple[torch.Size, ...], Plan] = {}
        self.error: Exception | None = None
        self.broken: str | None = None
        """Set when the candidate raised: the site then stays on the stock path."""
        self.id = next(_operator().ids)
        _operator().calls[self.id] = self

    def plan(self, shapes: tuple[torch.Size, ...]) -> Plan:
        """Decide once per combination of shapes."""
        axes = self.coverage.bind(shapes)
        if isinstance(axes, str):
            return Plan(axes)
        views = tuple(tuple(axes[a] for a in t.shape or ()) for t in self.coverage.activations)
        inner = tuple(axes[a] for a in (self.coverage.output.shape or ())[1:])
        lead = shapes[0][: len(shapes[0]) - len(views[0]) + 1]
        return Plan(None, views, (*lead, *inner))

    def run(self, *activations: torch.Tensor) -> torch.Tensor | None:
        """The candidate's result, or None when this call was not judged (counted, with the reason)."""
        shapes = tuple([x.shape for x in activations])
        plan = self.plans.get(shapes)
        if plan is None:
            plan = self.plans[shapes] = self.plan(shapes)
        reason = plan.reason or self.broken or self._unfit(activations)
        if reason is not None:
            self.tally.fall_back(reason)
            return None
        arguments = self.arguments.copy()
        for slot, x, view in zip(self.slots, activations, plan.views, strict=True):
            if not x.is_contiguous():
                if not any(x.stride()):
                    self.tally.fall_back("ahead")  # a blank: a fused call has done this one's work
                    return None
                x = x.contiguous()  # noqa: PLW2901
            elif x.data_ptr() % MIN_ALIGNMENT_BYTES:
                x = x.clone()  # noqa: PLW2901
            arguments[slot] = x.view(view)
        try:
            result = self.kernel(*arguments).view(plan.result)
        except Exception as error:  # whatever a candidate raises, the model goes on
            self.error, self.broken = error, f"error: {type(error).__name__}"
            self.tally.fall_back(self.broken)
            return None
        self.tally.taken += 1
        return result

    def _unfit(self, activations: Sequence[torch.Tensor]) -> str | None:
        """Why these tensors cannot go to the candidate, or None."""
        for x, dtype in zip(activations, self.dtypes, strict=True):
            if x.dtype is not dtype:
                return "dtype"
            if not x.is_cpu:
                return "device"
        if torch.is_grad_enabled() and (
            any(x.requires_grad for x in activations) or any(w.tensor.requires_grad for w in self.weights)
        ):
            return "grad"
        for weight in self.weights:
            if weight.stale():
                return "weights"
        return None

    def attempt(self) -> Callable[..., torch.Tensor | None]:
        """A function that gives the candidate's result, or None; to torch.compile it is one opaque operator."""
        run, site, operator = self.run, self.id, _operator().call

        def attempt(*activations: torch.Tensor) -> torch.Tensor | None:
            if torch.compiler.is_compiling():
                return None if torch.is_grad_enabled() else operator(activations, site)
            return run(*activations)

        return attempt

    def function(self) -> Callable[..., torch.Tensor]:
        """A function that gives the candidate's result where it was judged, and the stock path's elsewhere."""
        attempt, stock = self.attempt(), self.stock

        def function(*activations: torch.Tensor) -> torch.Tensor:
            result = attempt(*activations)
            return stock(*activations) if result is None else result

        return function

    def close(self) -> None:
        """Leave only the stock path, for compiled code that still refers to this call; drop packed weights."""
        _operator().calls[self.id] = self.stock
        self.kernel, self.arguments, self.weights, self.broken = self.stock, [], (), "removed"

    def meta(self, activations: Sequence[torch.Tensor]) -> torch.Tensor:
        """An empty tensor of the result's shape and dtype, for the compiler's shape inference."""
        x, axes = activations[0], dict(self.coverage.problem.axes)
        inner = (self.coverage.activations[0].shape or ())[1:]
        axes |= zip(inner, x.shape[x.dim() - len(inner) :], strict=True)
        out = [axes[axis] or 0 for axis in (self.coverage.output.shape or ())[1:]]
        return x.new_empty((*x.shape[: x.dim() - len(inner)], *out))


class _Operator(NamedTuple):
    """The custom operator that stands for a site in compiled graphs, opaque to the compiler."""

    library: torch.library.Library
    call: Callable[..., torch.Tensor]
    calls: dict[int, Any]
    """`Call`s by id; the stock function once a call is closed."""
    ids: Any


@functools.cache
def _operator() -> _Operator:
    """Register the operator on first use, once per process."""
    library = torch.library.Library("roofloop", "DEF")
    library.define("site(Tensor[] activations, int site) -> Tensor")
    calls: dict[int, Any] = {}

    def run(activations: list[torch.Tensor], site: int) -> torch.Tensor:
        call = calls[site]
        if not isinstance(call, Call):
            return call(*activations)
        result = call.run(*activations)
        return call.stock(*activations) if result is None else result

    def shape(activations: list[torch.Tensor], site: int) -> torch.Tensor:
        call = calls[site]
        return call.meta(activations) if isinstance(call, Call) else call(*activations)

    library.impl("site", run, "CompositeExplicitAutograd")
    torch.library.register_fake("roofloop::site", shape, lib=library)
    return _Operator(library, torch.ops.roofloop.site.default, calls, itertools.count())
