"""The decode step's place at transformers' attention interface.

An attention module asks `ALL_ATTENTION_FUNCTIONS` for the function that its config names. With an overlay the interface
gives a `Dispatcher` under that name, which hands a call to what the module itself carries and else to the library's
function. Config, masks and other models stay as they are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from kernels.overlay.call import Call

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""(module, query [batch, heads, queries, dim], key and value [batch, kv_heads, length, dim], mask, ...) → (output
[batch, queries, heads, dim], attention weights or None)."""

SEAT = "roofloop_attention"
"""Attribute of an attention module: the function that is called in the place of the library's."""
NAMES = ("sdpa", "eager")
_PASSED = frozenset(("position_ids", "use_cache", "sliding_window", "scaling", "dropout"))
"""Keywords that do not change the result for one query (a window is in the mask), or that are looked at one by one."""


@dataclass(frozen=True)
class Place:
    """An attention module that goes through the interface, and what it calls there."""

    module: Any
    interface: Any
    name: str
    """The interface's name for the function: `sdpa` or `eager`."""
    stock: Attention
    sizes: Mapping[str, int]
    """heads, kv_heads, dim."""

    def whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The problem's function on the model's own path; shapes and dtypes of the problem `attention_decode`."""
        mask = (torch.arange(k.shape[2], device=k.device) <= last[:, None])[:, None, None, :]
        if self.name == "eager":
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        return self.stock(self.module, q.unsqueeze(2), k, v, mask, scaling=self.module.scaling, dropout=0.0)[0][:, 0]

    def function(self, call: Call, prefixes: Prefixes) -> Attention:
        """The candidate for one query per sequence where it was judged; the library's function everywhere else."""
        module, stock, scale, tally = self.module, self.stock, self.module.scaling, call.tally

        def attention(
            owner: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            **more: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if torch.compiler.is_compiling():  # a graph cannot branch on what a mask holds
                return stock(owner, query, key, value, attention_mask, **more)
            result: torch.Tensor | None = None
            reason: str | None = None
            if query.shape[2] != 1:
                reason = "shape"
            elif more.get("dropout") or more.get("scaling") not in (None, scale) or _asks_more(module, more):
                reason = "arguments"
            else:
                last = prefixes.last(module, attention_mask, query.shape[0], key.shape[2])
                if last is None:
                    reason = "mask"
                else:
                    result = call.run(query.squeeze(2), key, value, last)
            if result is not None:
                return result.unsqueeze(1), None
            if reason is not None:
                tally.fall_back(reason)
            return stock(owner, query, key, value, attention_mask, **more)

        return attention

    def enter(self, problem: str) -> Callable[[], None]:
        """Let the interface call what modules carry under `SEAT`; returns the way back."""
        own = self.interface._local_mapping.get(self.name)
        dispatcher = own if isinstance(own, Dispatcher) else Dispatcher(own, self.interface.get(self.name))
        dispatcher.users += 1
        dispatcher.overlay = problem
        self.interface[self.name] = dispatcher

        def leave() -> None:
            dispatcher.users -= 1
            if dispatcher.users == 0 and dispatcher.own is None:
                del self.interface[self.name]
            elif dispatcher.users == 0:
                self.interface[self.name] = dispatcher.own

        return leave


class Dispatcher:
    """What stands in the interface while any model of the process has an overlay there."""

    def __init__(self, own: Attention | None, before: Attention | None) -> None:
        self.own = own
        """What the interface itself had under this name, apart from the library-wide functions."""
        self.before = before
        self.users = 0
        self.overlay = ""
        """Name of the problem whose kernel is behind it, for a profile."""

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        function: Attention = getattr(module, SEAT, None) or self.stock(module)
        return function(module, *args, **kwargs)

    def stock(self, module: nn.Module) -> Attention:
        """The library's function for `module`; the eager one stands beside the module's class."""
        return self.before or sys.modules[type(module).__module__].__dict__["eager_attention_forward"]


class _Known(NamedTuple):
    mask: torch.Tensor | None
    reader: nn.Module
    sizes: tuple[int, int]
    last: torch.Tensor | None


class Prefixes:
    """The last position that each sequence may see, read off a mask once per forward."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def last(self, reader: nn.Module, mask: torch.Tensor | None, batch: int, length: int) -> torch.Tensor | None:
        """int64 [batch], or None where the mask is not a prefix of at least one position for every sequence."""
        known = self._known
        # Layers share the mask object. The layer that read it meets it again in another forward only, and by then it
        # may hold something else.
        if known is None or known.mask is not mask or known.reader is reader or known.sizes != (batch, length):
            known = self._known = _Known(mask, reader, (batch, length), last_seen(mask, batch, length))
        return known.last


def last_seen(mask: torch.Tensor | None, batch: int, length: int) -> torch.Tensor | None:
    """int64 [batch]: index of the last position that a mask leaves visible, where those before it all are.

    Args:
        mask: [batch or 1, 1, 1, length], bool (True is visible) or floating (0 is visible, the dtype's lowest number
            or minus infinity is not); None leaves all visible.
        batch: sequences.
        length: positions.
    """
    if mask is None:
        return torch.full((batch,), length - 1)
    if not mask.is_cpu or mask.shape not in ((batch, 1, 1, length), (1, 1, 1, length)):
        return None
    rows = mask[: 1 if mask.stride(0) == 0 else None, 0, 0]  # an expanded mask is one row for all
    seen = rows if mask.dtype is torch.bool else rows == 0
    count = seen.sum(-1)
    if mask.dtype is not torch.bool and (
        not mask.is_floating_point() or not bool((seen | (rows <= torch.finfo(mask.dtype).min)).all())
    ):
        return None
    if not bool(count.all()) or not torch.equal(seen, torch.arange(length) < count[:, None]):
        return None
    return (count - 1).expand(batch).contiguous()


def place_of(module: nn.Module) -> Place | None:
    """The place of an attention module that goes through the interface with the usual scale; None for any other."""
    namespace = sys.modules.get(type(module).__module__)
    interface: Any = getattr(namespace, "ALL_ATTENTION_FUNCTIONS", None)
    config: Any = getattr(module, "config", None)
    scale, dim = getattr(module, "scaling", None), getattr(module, "head_dim", None)
    name = getattr(config, "_attn_implementation", None)
    if interface is None or name not in NAMES or not isinstance(dim, int):
        return None
    if not isinstance(scale, float) or not math.isclose(scale, dim**-0.5):
        return None
    found = interface.get(name, getattr(namespace, "eager_attention_forward", None) if name == "eager" else None)
    stock = found.stock(module) if isinstance(found, Dispatcher) else found
    sizes = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "dim": dim}
    return None if stock is None else Place(module, interface, name, stock, sizes)


def _asks_more(module: Any, more: Mapping[str, Any]) -> bool:
    """Whether attention weights or something else is asked for than plain attention."""
    if getattr(module.config, "output_attentions", False):
        return True
    return any(value is not None and value is not False and key not in _PASSED for key, value in more.items())
