"""Inputs: where they lie, what values they take, and when they come to be.

Every call gets values that did not exist before its clock started. They lie in a memory file that the worker can only
read: the ruler's mapping is older than the seal. Outputs lie in another, between guard words, filled with poison.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.ruler.spec import Problem, Shape, Tensor

REGIMES = ("normal", "large", "tiny", "mixed", "integer", "denormal", "zero_rows", "nonfinite")
"""Value regimes that a problem may declare legal; `normal` is always drawn."""
LINE, GUARD = 64, 64
SIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


Views = list["torch.Tensor | None"]
"""One tensor [slots or weight sets, *shape] for each input; None for a scalar."""


def torch_dtype(name: str) -> torch.dtype:
    """`float32` → `torch.float32`."""
    return getattr(torch, name)


def generator(secret: bytes, *what: object) -> np.random.Generator:
    """An independent stream for each purpose; nothing about one follows from another without the secret."""
    digest = hashlib.blake2b(repr(what).encode(), key=secret[:64], digest_size=32).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


class Memory:
    """A shared memory file: written here, and mapped by one or more workers."""

    def __init__(self, size: int, *, sealed: bool) -> None:
        self.size = max(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        self.sealed = False
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("roofloop", os.MFD_CLOEXEC | getattr(os, "MFD_ALLOW_SEALING", 2))
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, self.size)
        self.map = mmap.mmap(self.fd, self.size)
        if sealed:
            try:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, 0x2 | 0x4 | 0x10 | 0x1)  # shrink, grow, future writes, seal
                self.sealed = True
            except (OSError, AttributeError):
                pass
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.ticket: list[Any] = []

    def close(self) -> None:
        """Give the memory back."""
        del self.bytes
        os.close(self.fd)
        self.map.close()


class DeviceMemory:
    """Memory on an accelerator (CUDA, ROCm) that is the ruler's; workers open it by its handle.

    Inputs cannot be sealed there. A candidate that writes to its own spoils its own results at most: the baseline's
    worker gets the same values written anew before it runs, and expectations come from copies.
    """

    def __init__(self, size: int, device: str) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.sealed = False
        self.bytes = torch.zeros(self.size, dtype=torch.uint8, device=device)
        handle = self.bytes.untyped_storage()._share_cuda_()
        self.ticket: list[Any] = [part.hex() if isinstance(part, bytes) else part for part in handle]
        self.fd = os.open(os.devnull, os.O_RDWR)  # in the place of the memory file

    def close(self) -> None:
        """Give the memory back."""
        del self.bytes
        os.close(self.fd)


def allocate(size: int, *, sealed: bool, device: str) -> Memory | DeviceMemory:
    """Memory for inputs (`sealed`) or outputs where the candidate computes."""
    return Memory(size, sealed=sealed) if device == "cpu" else DeviceMemory(size, device)


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: `offset + slot · pitch` bytes; `strides` in elements."""

    offset: int
    pitch: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of one slot's values."""
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """All tensors of one shape, `slots` times; a constant lies there once for each of `sets` weight sets."""

    axes: Mapping[str, int]
    slots: int
    sets: int
    inputs: tuple[Place | None, ...]
    """None for a scalar."""
    outputs: tuple[Place, ...]
    input_bytes: int
    output_bytes: int


def layout(
    problem: Problem, shape: Shape, slots: int, *, sets: int = 1, shift: int = 0, padded: bool = False
) -> Layout:
    """Lay out `slots` calls. `shift`: bytes past a cache line; `padded`: rows of inputs are not adjacent."""
    axes = problem.axis_values(shape)

    def dims(tensor: Tensor) -> tuple[int, ...]:
        return tuple(axes[name] for name in tensor.shape or ())

    at = 0
    inputs: list[Place | None] = []
    for tensor in problem.inputs:
        if tensor.shape is None:
            inputs.append(None)
            continue
        size, sizes = SIZES[tensor.dtype], dims(tensor)
        pads = padded and len(sizes) > 1 and not tensor.constant
        strides = _strides(sizes, 3 if pads else 0)
        extent = (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))) * size if sizes else size
        moved = shift - shift % size
        pitch = -(-(extent + moved) // LINE) * LINE
        inputs.append(Place(at + moved, pitch, sizes, strides, tensor.dtype))
        at += pitch * (sets if tensor.constant else slots)
    outputs, out = [], 0
    for tensor in problem.outputs:
        sizes = dims(tensor)
        extent = math.prod(sizes) * SIZES[tensor.dtype]
        pitch = -(-(extent + 2 * GUARD) // LINE) * LINE
        outputs.append(Place(out + GUARD, pitch, sizes, _strides(sizes, 0), tensor.dtype))
        out += pitch * slots
    return Layout(axes, slots, sets, tuple(inputs), tuple(outputs), at, out)


def _strides(sizes: tuple[int, ...], pad: int) -> tuple[int, ...]:
    strides, step = [], 1
    for position, size in enumerate(reversed(sizes)):
        strides.append(step)
        step *= size + (pad if position == 0 else 0)
    return tuple(reversed(strides))


def batch_view(memory: Memory | DeviceMemory, place: Place, slots: int) -> torch.Tensor:
    """The tensor of all slots at once: shape [slots, *shape], over the memory itself."""
    size = SIZES[place.dtype]
    first = place.offset // size
    flat = memory.bytes[: memory.size // 8 * 8].view(torch_dtype(place.dtype))
    return flat.as_strided((slots, *place.shape), (place.pitch // size, *place.strides), first)


def poison(memory: Memory | DeviceMemory, plan: Layout, rng: np.random.Generator) -> int:
    """Fill the outputs and their guards with one fresh random word; returns it."""
    word = int(rng.integers(1 << 62, 1 << 63))
    memory.bytes[: plan.output_bytes].view(torch.int64).fill_(word)
    return word


def guards_intact(memory: Memory | DeviceMemory, plan: Layout, word: int) -> bool:
    """Whether every byte around the outputs is still as the poison left it."""
    for place in plan.outputs:
        data = place.bytes
        block = memory.bytes.as_strided((plan.slots, place.pitch), (place.pitch, 1), place.offset - GUARD)
        pattern = np.resize(np.frombuffer(word.to_bytes(8, "little"), np.uint8), place.pitch)
        expected = torch.from_numpy(pattern).to(block.device)
        if not torch.equal(block[:, :GUARD], expected[:GUARD].expand(plan.slots, -1)):
            return False
        if not torch.equal(block[:, GUARD + data :], expected[GUARD + data :].expand(plan.slots, -1)):
            return False
    return True


def values(
    tensor: Tensor, size: tuple[int, ...], regime: str, rng: np.random.Generator, axes: Mapping[str, int]
) -> torch.Tensor:
    """Fresh values of shape `size` = (slots, *dims) for one tensor, in float32 (or an integer type)."""
    if tensor.dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, size).astype(bool))
    if not tensor.dtype.startswith(("float", "bfloat")):
        high = int(eval(tensor.high, {"__builtins__": {}}, dict(axes))) if tensor.high else 8
        return torch.from_numpy(rng.integers(0, high, size))
    drawn = rng.standard_normal(size, dtype=np.float32)
    half = tensor.dtype == "float16"
    rows = (*size[:-1], 1)
    if regime == "large":
        drawn *= 30 if half else 300
    elif regime == "tiny":
        drawn *= (10.0 ** rng.uniform(-4 if half else -20, -3, rows)).astype(np.float32)
    elif regime == "mixed":
        drawn *= (10.0 ** rng.uniform(-2, 2, size)).astype(np.float32)
    elif regime == "integer":
        drawn = rng.integers(-3, 4, size).astype(np.float32)
    elif regime == "denormal":
        drawn = (rng.uniform(2e-39, 1.1e-38, size) * rng.choice([-1, 1], size)).astype(np.float32)
    elif regime == "zero_rows":
        drawn *= rng.integers(0, 2, rows).astype(np.float32)
    elif regime == "nonfinite":  # a third of the rows: all three kinds; a third: a mask of minus infinities
        where, kind = rng.random(size), rng.integers(0, 3, rows)
        for index, bad in enumerate((np.nan, np.inf, -np.inf)):
            drawn[(kind == 0) & (where > index * 0.004) & (where < (index + 1) * 0.004)] = bad
        drawn[(kind == 1) & (where < 0.2)] = -np.inf
    return torch.from_numpy(drawn)


def scalars(problem: Problem, rng: np.random.Generator | None) -> list[float | int | None]:
    """Values of scalar inputs in input order (None for tensors): the visible ones, or drawn around them."""
    drawn: list[float | int | None] = []
    for tensor in problem.inputs:
        if tensor.shape is not None:
            drawn.append(None)
            continue
        value: Any = problem.scalars.get(tensor.name, 1)
        if rng is not None and isinstance(value, float):
            value = float(np.float32(value * 10.0 ** rng.uniform(-2, 2)))
        drawn.append(float(np.float32(value)) if isinstance(value, float) else value)
    return drawn


def fill(problem: Problem, plan: Layout, memory: Memory | DeviceMemory, rng: np.random.Generator, *,
         regime: str = "normal", target: int | None = None, constants: bool = True,
         twists: bool = False) -> Views:  # fmt: skip
    """Write fresh values for every slot; returns the views.

    A special regime is applied to one tensor (the `target`-th that is not of integers, else a drawn one) and, half
    the time, to all (denormals and non-finite values to one only: with denormals the others are large). With
    `twists`, a third of the slots (of many: some dozens) repeat the previous call at their address, or the previous
    slot, with one element changed or with every row rotated: what remembers by address, by samples or by sums is
    then wrong.
    """
    floats = [i for i, t in enumerate(problem.inputs) if t.shape is not None and "float" in t.dtype]
    chosen = {int(rng.choice(floats)) if target is None else floats[target % len(floats)]} if floats else set()
    if regime not in ("denormal", "nonfinite") and rng.random() < 0.5:
        chosen = set(floats)
    most = 2 if plan.slots == 1 else max(12, plan.slots // 16)
    kinds = rng.integers(0, most, plan.slots) if twists else np.full(plan.slots, 11)
    single = int(rng.choice(floats)) if floats else -1
    turn = int(rng.integers(1, 1 << 30))
    views: Views = []
    for index, (tensor, place) in enumerate(zip(problem.inputs, plan.inputs, strict=True)):
        if place is None:
            views.append(None)
            continue
        count = plan.sets if tensor.constant else plan.slots
        view = batch_view(memory, place, count)
        views.append(view)
        if tensor.constant and not constants:
            continue
        new = values(tensor, (count, *place.shape), regime if index in chosen else "normal", rng, plan.axes)
        if regime == "denormal" and index not in chosen and "float" in tensor.dtype:
            new *= 1e5
        if regime == "nonfinite" and index not in chosen and "float" in tensor.dtype:
            new[torch.from_numpy(rng.random(new.shape) < 0.05)] = 0  # zero times infinity is not zero
        for slot in np.flatnonzero(kinds < 4) if place.bytes and not tensor.constant else ():
            new[slot] = view[slot] if kinds[slot] < 2 else new[slot - 1]
            if kinds[slot] % 2 == 0 and index == single:
                flat = new[slot].view(-1)
                flat[turn % len(flat)] = 1.5 - flat[turn % len(flat)]
            elif kinds[slot] % 2 == 1 and place.shape and place.shape[-1] > 1:
                new[slot] = new[slot].roll(1 + turn % (place.shape[-1] - 1), -1)
        view.copy_(new)
    return views


def hidden_shapes(problem: Problem, rng: np.random.Generator) -> list[dict[str, int]]:
    """The problem's hidden shapes; where it has none, drawn ones: 1, primes, tails, tall and wide."""
    if problem.hidden:
        return [dict(shape) for shape in problem.hidden]
    free = [name for name, value in problem.axes.items() if value is None]
    if not free:
        return []
    first = problem.visible[0]

    def tail(most: int) -> int:
        """Just past a multiple of eight, at least nine, about `most` at most."""
        return 8 * int(rng.integers(1, max(most // 8, 2))) + int(rng.choice([1, 3, 5, 7]))

    drawn = [dict.fromkeys(free, 1), {name: tail(min(first[name], 48)) for name in free}]
    drawn.append({name: int(rng.choice([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37])) for name in free})
    for wide in free[:4]:
        drawn.append({name: tail(min(first[name], 800) if name == wide else 24) for name in free})
    return drawn
