"""Installs promoted candidates in a model and takes them off again."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from kernels.errors import InputError
from kernels.overlay import attention, sites
from kernels.overlay.call import MIN_ALIGNMENT_BYTES, Call, Coverage, Tally, Weight
from kernels.ruler.inputs import generator, torch_dtype, values
from kernels.ruler.spec import Candidate, Problem

PROBE_RELATIVE_ERROR = 0.05
"""‖candidate − stock‖ / ‖stock‖ at which the probe calls a site mismatched. It looks for swapped or transposed weights
(errors near 1); accuracy is the ruler's and the gate's to judge (bf16 paths differ by some 0.01)."""


class PromotedLike(Protocol):
    """What is installed: `profiles.engines.base.Promoted`, or anything with these."""

    @property
    def problem(self) -> Problem:
        """The problem that the candidate solves."""

    @property
    def candidate(self) -> Candidate:
        """The candidate that the ruler approved."""

    @property
    def judged(self) -> tuple[dict[str, int], ...]:
        """Shapes that the verdict covers; empty: any within the range of visible and hidden shapes."""


@dataclass
class _Entry:
    """One promoted candidate while it is installed."""

    promoted: PromotedLike
    tally: Tally = field(default_factory=Tally)
    calls: list[Call] = field(default_factory=list)
    prepare_s: float = 0.0
    prepared_bytes: int = 0
    disabled: dict[str, int] = field(default_factory=dict)
    """Sites that were left on the stock path, by reason."""
    loaded: Any = None

    def disable(self, reason: str) -> None:
        self.disabled[reason] = self.disabled.get(reason, 0) + 1


@dataclass
class _Changes:
    """What was changed of a model and the library around it."""

    originals: dict[tuple[nn.Module, str], Any] = field(default_factory=dict)
    """What a module had of its own under an attribute."""
    ways_back: list[Callable[[], None]] = field(default_factory=list)


class Handle:
    """What was installed: its counts, and the way back."""

    def __init__(self, entries: Sequence[_Entry], changes: _Changes, threads: int) -> None:
        self._entries = list(entries)
        self._changes = changes
        self._threads = threads

    def counts(self) -> list[dict[str, Any]]:
        """Per promoted candidate: problem, candidate, sites, taken, fell_back, reasons, prepare_s, prepared_bytes.

        `reasons` counts fallen-back calls by `shape`, `empty`, `dtype`, `device`, `grad`, `weights` (changed since they
        were packed), `ahead` (a fused call had done the work), `mask` (not a plain prefix), `arguments` (something else
        was asked for) or `error: …`; and sites that never came into use by `disabled: …`.
        """
        return [
            {
                "problem": entry.promoted.problem.name,
                "candidate": entry.promoted.candidate.id,
                "sites": len(entry.calls),
                "taken": entry.tally.taken,
                "fell_back": sum(entry.tally.reasons.values()),
                "reasons": {**entry.tally.reasons, **{f"disabled: {k}": n for k, n in entry.disabled.items()}},
                "prepare_s": entry.prepare_s,
                "prepared_bytes": entry.prepared_bytes,
            }
            for entry in self._entries
        ]

    def reset(self) -> None:
        """Set all call counts to zero."""
        for entry in self._entries:
            entry.tally.reset()

    def remove(self) -> None:
        """Give every module its own forward back and drop what was packed. Does nothing the second time."""
        for leave in self._changes.ways_back:
            leave()
        for (module, attribute), original in self._changes.originals.items():
            if original is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, original)
        self._changes = _Changes()
        for entry in self._entries:
            for call in entry.calls:
                call.close()
            entry.loaded = None
        _forget_compiled()
        torch.set_num_threads(self._threads)


def install(model: nn.Module, promoted: Sequence[PromotedLike], builds: Path, threads: int) -> Handle:
    """Put promoted candidates into a model.

    Weights are packed here, once per site; a candidate that cannot be loaded, raises or gives something else than the
    stock path on a probe stays out, and its counts say why. Calls that were not judged (shape, dtype, device, gradients
    wanted, weights changed since) take the stock path.

    Args:
        model: a Llama-like model on the CPU.
        promoted: in any order; coarse operators are laid over fine ones, the later over the earlier of a kind.
        builds: the build cache, where `kernels.ruler.build` has put the artefacts.
        threads: threads that torch and the candidates' OpenMP regions use (one pool); the old number is restored by
            `remove`.

    Raises:
        InputError: the model already has an overlay.
    """
    seats = ("forward", attention.SEAT)
    if any(getattr(m.__dict__.get(seat), "overlay", False) for m in model.modules() for seat in seats):
        raise InputError("the model already has an overlay.", remedy="Call remove() on the first one.")
    entries = [_Entry(p) for p in promoted]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    changes = _Changes()
    known = sites.operators()
    for entry in entries:
        if entry.promoted.problem.operator not in known:
            entry.disable(f"no site for operator {entry.promoted.problem.operator}")
        else:
            entry.loaded = _guarded(entry, functools.partial(_load, entry.promoted, builds))
    for kind in sites.KINDS:
        for entry in entries:
            if entry.loaded is not None and entry.promoted.problem.operator == kind.operator:
                for spot in kind.find(model):
                    _occupy(entry, spot, changes)
    for entry in entries:
        entry.tally.reset()  # probes of coarse sites go through the fine ones
        if entry.loaded is not None and not entry.calls and not entry.disabled:
            entry.disable("no module of the model has these weights")
    if changes.originals:
        _forget_compiled()
    return Handle(entries, changes, before)


def _load(promoted: PromotedLike, builds: Path) -> Any:
    from kernels import languages

    return languages.load(promoted.candidate, promoted.problem, builds)


def _guarded(entry: _Entry, work: Callable[[], Any]) -> Any:
    """The result of a candidate's code, or None and a reason in the counts: nothing it raises stops the engine."""
    try:
        return work()
    except Exception as error:
        entry.disable(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
        return None


def _occupy(entry: _Entry, spot: sites.Spot, changes: _Changes) -> None:
    """Put the candidate in one spot, if sizes, weights, packing and probe agree."""
    promoted = entry.promoted
    if any(promoted.problem.axes.get(axis) != size for axis, size in spot.axes.items()):
        return
    groups = [tuple(Weight.of(module, key) for module, key in group) for group in spot.constants]
    constants = _constants(promoted.problem, [[w.tensor for w in group] for group in groups])
    if constants is None or entry.loaded is None:
        return
    weights = [weight for group in groups for weight in group]
    arguments = _guarded(entry, lambda: list(_arguments(entry, constants, spot.scalars)))
    if arguments is None:
        return
    call = Call(
        kernel=entry.loaded,
        arguments=arguments,
        coverage=Coverage(promoted.problem, promoted.judged),
        stock=spot.stock,
        weights=weights,
        tally=entry.tally,
    )
    problem = _guarded(entry, lambda: _probe(call))
    if problem is None or problem:
        call.close()
        if problem:
            entry.disable(problem)
        else:
            entry.loaded = None  # it raised: once is enough
        return
    entry.calls.append(call)
    for module, forward in spot.patch(call).items():
        changes.originals.setdefault((module, spot.attribute), module.__dict__.get(spot.attribute))
        forward.overlay = promoted.problem.name  # type: ignore[attr-defined]
        setattr(module, spot.attribute, forward)
    if spot.enter is not None:
        changes.ways_back.append(spot.enter(promoted.problem.name))


def _constants(problem: Problem, groups: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor] | None:
    """The constant inputs, concatenated where a fused operator wants several as one; None when they do not fit."""
    wanted = [t for t in problem.inputs if t.constant and t.shape is not None]
    if len(wanted) != len(groups):
        return None
    for tensor, group in zip(wanted, groups, strict=True):
        sizes = tuple(problem.axes[axis] for axis in tensor.shape or ())
        actual = (sum(w.shape[0] for w in group), *group[0].shape[1:])
        same = all(w.shape[1:] == group[0].shape[1:] and w.is_cpu for w in group)
        if not same or sizes != actual or any(w.dtype is not getattr(torch, tensor.dtype) for w in group):
            return None
    with torch.no_grad():
        return [group[0].detach() if len(group) == 1 else torch.cat([w.detach() for w in group]) for group in groups]


def _arguments(entry: _Entry, constants: Sequence[torch.Tensor], scalars: Sequence[float]) -> Iterator[Any]:
    """The candidate's inputs in order: packed weights, weights and scalars; None where an activation goes."""
    problem, prepares = entry.promoted.problem, entry.promoted.candidate.prepares
    weights, numbers = iter(constants), iter(scalars)
    packed = None
    if prepares:
        began = time.perf_counter()
        with torch.no_grad():
            packed = entry.loaded.prepare(*constants)
        entry.prepare_s += time.perf_counter() - began
        entry.prepared_bytes += _nbytes(packed)
    for tensor in problem.inputs:
        if tensor.shape is None:
            yield next(numbers)
        elif not tensor.constant:
            yield None
        elif not prepares:
            weight = next(weights).contiguous()
            yield weight.clone() if weight.data_ptr() % MIN_ALIGNMENT_BYTES else weight
        elif packed is not None:
            yield packed
            packed = None


def _nbytes(value: Any) -> int:
    """Memory that a packed object holds."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(_nbytes(v) for v in value.values())
    if isinstance(value, (tuple, list)):
        return sum(_nbytes(v) for v in value)
    return int(getattr(value, "nbytes", 0))


def _probe(call: Call) -> str:
    """Call the candidate once on random inputs: an empty string, or what is wrong with its answer.

    Raises:
        Exception: whatever the candidate raises.
    """
    axes = call.coverage.problem.axis_values(call.coverage.smallest())
    rng = generator(b"probe")
    inputs = [
        values(t, tuple(axes[a] for a in t.shape or ()), "normal", rng, axes).to(torch_dtype(t.dtype))
        for t in call.coverage.activations
    ]
    with torch.no_grad():
        expected = call.stock(*inputs)
        result = call.run(*inputs)
        if call.error is not None:
            raise call.error
        if result is None:
            return f"probe refused: {', '.join(call.tally.reasons)}"
        if result.shape != expected.shape or result.dtype is not expected.dtype:
            return f"probe: {result.dtype} {tuple(result.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        error = torch.linalg.vector_norm(result.double() - expected.double())
        norm = torch.linalg.vector_norm(expected.double())
        if not bool(error <= PROBE_RELATIVE_ERROR * norm):
            return f"probe: differs from the stock path by {float(error / norm):.2g} of its norm"
    return ""


def _forget_compiled() -> None:
    """Code that torch.compile has made for this process was made for the old forwards."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
