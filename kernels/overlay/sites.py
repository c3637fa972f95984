"""Where in a Llama-like model each operator is computed, and how its forward is replaced.

A place is recognised by what a module is and does, not by its path. What a finder takes for a match is checked twice
more before it is used: the weights must have the problem's shapes and dtypes, and a probe compares the candidate with
the stock path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kernels.overlay import attention
from kernels.overlay.call import Call

Forward = Callable[..., Any]
Parameter = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


@dataclass(frozen=True)
class Spot:
    """One place where a problem's function is computed."""

    name: str
    """Path of the module in the model."""
    constants: tuple[tuple[Parameter, ...], ...]
    """Per constant input of the problem, in order: the parameters that, concatenated along axis 0, make it up."""
    stock: Callable[..., torch.Tensor]
    """The function itself on the model's own path, as it stands before this spot is patched."""
    patch: Callable[[Call], Mapping[nn.Module, Forward]]
    """New forwards by module."""
    scalars: tuple[float, ...] = ()
    """Values of the problem's scalar inputs, in order."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Constant axes of the problem that no weight shows."""
    attribute: str = "forward"
    """The modules' attribute that `patch` has values for."""
    enter: Callable[[str], Callable[[], None]] | None = None
    """Makes the model call that attribute, if it does not by itself, for the problem of this name; returns the way
    back."""


@dataclass(frozen=True)
class SiteKind:
    """How to find the places of one operator."""

    operator: str
    find: Callable[[nn.Module], Iterator[Spot]]


@dataclass
class Shared:
    """What a fused call has computed ahead for the modules that follow it in the same forward."""

    given: torch.Tensor | None = None
    """The tensor object by which the followers recognise their input; held, so that no other can take its place."""
    parts: Sequence[torch.Tensor] = ()
    blanks: dict[torch.Size, torch.Tensor] = field(default_factory=dict)

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        """NaN in the shape of `like`, without memory: whoever else reads it is loudly wrong instead of silently."""
        if torch.compiler.is_compiling():
            return like.new_full((1,), float("nan")).expand(like.shape)
        blank = self.blanks.get(like.shape)
        if blank is None:
            blank = self.blanks[like.shape] = like.new_full((1,), float("nan")).expand(like.shape)
        return blank

    def follower(self, index: int, last: bool, stock: Forward) -> Forward:
        """The forward of a module whose result is part `index`."""

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if x is not self.given:
                return stock(x, *args, **kwargs)
            part = self.parts[index]
            if last:
                self.given, self.parts = None, ()
            return part

        return forward


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """RMSNorm modules: named so, one weight, an epsilon."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm") and _plain(module, ("weight",)) and _epsilon(module) is not None:
            yield name, module


def _mlps(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Gated MLPs `down(silu(gate(x)) * up(x))`."""
    for name, module in model.named_modules():
        if all(_linear(getattr(module, part, None)) for part in ("gate_proj", "up_proj", "down_proj")):
            activation = getattr(module, "act_fn", None)
            if isinstance(activation, nn.SiLU) or type(activation).__name__ in ("SiLUActivation", "SiLU"):
                yield name, module


def _attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attention modules with separate query, key and value projections."""
    for name, module in model.named_modules():
        if all(_linear(getattr(module, part, None)) for part in ("q_proj", "k_proj", "v_proj")):
            yield name, module


def _linear(module: Any) -> bool:
    return type(module) is nn.Linear and module.bias is None


def _plain(module: nn.Module, parameters: tuple[str, ...]) -> bool:
    return tuple(k for k, v in module._parameters.items() if v is not None) == parameters


def _epsilon(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", None)


def _direct(name: str, module: nn.Module, constants: tuple[tuple[Parameter, ...], ...], *scalars: float) -> Spot:
    """A spot whose function is the module's forward."""

    def patch(call: Call) -> dict[nn.Module, Forward]:
        forward = call.function()
        forward.whole = True  # type: ignore[attr-defined]
        return {module: forward}

    return Spot(name, constants, module.forward, patch, scalars)


def rmsnorm(model: nn.Module) -> Iterator[Spot]:
    """Inputs: x [rows, hidden], weight [hidden], epsilon."""
    for name, module in _norms(model):
        yield _direct(name, module, (((module, "weight"),),), float(_epsilon(module) or 0.0))


def linear(model: nn.Module) -> Iterator[Spot]:
    """Inputs: x [m, k], weight [n, k]. Any nn.Linear without bias, a tied output projection among them."""
    for name, module in model.named_modules():
        if _linear(module):
            yield _direct(name, module, (((module, "weight"),),))


def silu_mul(model: nn.Module) -> Iterator[Spot]:
    """Inputs: gate and up, both flat [n]; the projections around it stay what they are."""
    for name, mlp in _mlps(model):

        def patch(call: Call, mlp: Any = mlp) -> dict[nn.Module, Forward]:
            function, gate, up, down = call.function(), mlp.gate_proj, mlp.up_proj, mlp.down_proj
            return {mlp: lambda x: down(function(gate(x), up(x)))}

        yield Spot(name, (), lambda gate, up, act=mlp.act_fn: act(gate) * up, patch)


def mlp(model: nn.Module) -> Iterator[Spot]:
    """Inputs: x [m, hidden], gate and up [width, hidden], down [hidden, width]."""
    for name, module in _mlps(model):
        yield _direct(name, module, _weights(module.gate_proj, module.up_proj, module.down_proj))


def joined_linear(model: nn.Module) -> Iterator[Spot]:
    """Linears on the same input as one: q, k, v; gate, up. Inputs: x [m, k], weight [Σn, k]."""
    for name, owner, parts in _joined(model):

        def patch(call: Call, owner: nn.Module = owner, parts: list[nn.Linear] = parts) -> dict[nn.Module, Forward]:
            shared, attempt, stock = Shared(), call.attempt(), owner.forward
            sizes = [part.out_features for part in parts]

            def forward(*args: Any, **kwargs: Any) -> Any:
                x = args[0] if args else kwargs["hidden_states"]
                result = attempt(x)
                if result is not None:
                    shared.given, shared.parts = x, result.split(sizes, -1)
                return stock(*args, **kwargs)

            return {owner: forward, **_followers(shared, parts)}

        yield Spot(name, (tuple((part, "weight") for part in parts),), _side_by_side(parts), patch)


def rmsnorm_linear(model: nn.Module) -> Iterator[Spot]:
    """A norm and the linears behind it. Inputs: x [m, k], norm weight [k], weight [Σn, k], epsilon."""
    norms = dict(_norms(model))
    for name, owner, parts in _joined(model):
        norm = _norm_before(model, norms, name)
        # an MLP that is one call already would read the blank
        if norm is not None and not getattr(owner.forward, "whole", False):
            constants = (((norm, "weight"),), tuple((part, "weight") for part in parts))
            yield _after_norm(f"{name}+norm", norm, parts, [p.out_features for p in parts], constants)


def attention_decode(model: nn.Module) -> Iterator[Spot]:
    """Inputs: q [batch, heads, dim], k and v [batch, kv_heads, length, dim] (a whole static cache), last [batch]."""
    prefixes = attention.Prefixes()
    for name, module in model.named_modules():
        place = attention.place_of(module)
        if place is not None:

            def patch(call: Call, place: attention.Place = place) -> dict[nn.Module, Forward]:
                return {place.module: place.function(call, prefixes)}

            yield Spot(name, (), place.whole, patch, (), place.sizes, attention.SEAT, place.enter)


def _weights(*modules: nn.Module) -> tuple[tuple[Parameter, ...], ...]:
    return tuple(((module, "weight"),) for module in modules)


def _joined(model: nn.Module) -> Iterator[tuple[str, Any, list[nn.Linear]]]:
    for name, module in _attentions(model):
        yield name, module, [module.q_proj, module.k_proj, module.v_proj]
    for name, module in _mlps(model):
        yield name, module, [module.gate_proj, module.up_proj]


def _norm_before(model: nn.Module, norms: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """The norm whose output goes to module `name` and nowhere else in a pre-norm decoder layer."""
    layer, _, child = name.rpartition(".")
    before = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}.get(child)
    others = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # sandwich norms: another order
    if before is None or any(hasattr(model.get_submodule(layer), other) for other in others):
        return None
    return norms.get(f"{layer}.{before}" if layer else before)


def _side_by_side(parts: Sequence[nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    forwards = [part.forward for part in parts]
    return lambda x: torch.cat([forward(x) for forward in forwards], dim=-1)


def _followers(shared: Shared, parts: Sequence[nn.Module]) -> dict[nn.Module, Forward]:
    return {part: shared.follower(i, i == len(parts) - 1, part.forward) for i, part in enumerate(parts)}


def _after_norm(
    name: str,
    norm: nn.Module,
    parts: Sequence[nn.Module],
    sizes: list[int],
    constants: tuple[tuple[Parameter, ...], ...],
) -> Spot:
    """A spot that opens at a norm: the norm hands on a blank, and the modules behind it their part of the result."""
    side_by_side, stock = _side_by_side(parts), norm.forward

    def patch(call: Call) -> dict[nn.Module, Forward]:
        shared, attempt = Shared(), call.attempt()

        def forward(x: torch.Tensor) -> torch.Tensor:
            result = attempt(x)
            if result is None:
                return stock(x)
            shared.given, shared.parts = shared.blank(x), result.split(sizes, -1)
            return shared.given

        return {norm: forward, **_followers(shared, parts)}

    return Spot(name, constants, lambda x: side_by_side(stock(x)), patch, (float(_epsilon(norm) or 0.0),))


KINDS = (
    SiteKind("rmsnorm", rmsnorm),
    SiteKind("linear", linear),
    SiteKind("silu_mul", silu_mul),
    SiteKind("linear", joined_linear),
    SiteKind("mlp", mlp),
    SiteKind("rmsnorm_linear", rmsnorm_linear),
    SiteKind("attention_decode", attention_decode),
)
"""In the order of installation: a coarser kind falls back to the finer ones that were installed before it."""


def operators() -> tuple[str, ...]:
    """The operators that have a site."""
    return tuple(dict.fromkeys(kind.operator for kind in KINDS))
