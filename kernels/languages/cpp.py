"""Plain C ABI: a shared library called through ctypes, with as little as possible between two tensors and the kernel.

Libraries are built with OpenMP but not linked to a runtime: torch's libgomp, loaded globally by `import torch`, serves
them, so that a process has one thread pool. Two pools of spinning threads slow each other down many times.
"""

from __future__ import annotations

import ctypes
import functools
import re
import time
from pathlib import Path
from typing import Any

import torch

from kernels.languages.loaded import Loaded, Packed
from kernels.ruler.spec import Candidate, Problem

ALIGNMENT_BYTES = 64
"""Packed constants start on a cache line."""


def load(path: Path, problem: Problem, candidate: Candidate) -> Loaded:
    """Load the library at `path`, built from `candidate`.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it lacks a function.
    """
    share_openmp()
    library = ctypes.CDLL(str(path))
    pack = _packer(library, problem) if candidate.prepares else None
    return Loaded(candidate, problem, _caller(library, problem, candidate), pack)


@functools.cache
def share_openmp() -> None:
    """Make torch's own libgomp visible to libraries that are loaded later (it is, where torch was loaded globally)."""
    for place in ("lib", "../torch.libs"):
        for file in sorted((Path(torch.__file__).parent / place).glob("libgomp*.so*")):
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
            return


def _caller(library: ctypes.CDLL, problem: Problem, candidate: Candidate) -> Any:
    """A Python function for this very problem: sizes and dtypes are written into it, so a call only reads pointers."""
    function = library[candidate.entry]
    function.restype = None
    types: list[Any] = []
    names, passed = [], []
    bound = {axis: str(value) for axis, value in problem.axes.items() if value is not None}
    packed = False
    for tensor in problem.inputs:
        if tensor.constant and candidate.prepares:
            if not packed:
                names.append("packed")
                passed.append("packed.data_ptr()")
                types.append(ctypes.c_void_p)
            packed = True
            continue
        names.append(f"in_{tensor.name}")
        if tensor.shape is None:
            passed.append(names[-1])
            types.append(ctypes.c_int64 if tensor.dtype.startswith("int") else ctypes.c_float)
            continue
        passed.append(f"{names[-1]}.data_ptr()")
        types.append(ctypes.c_void_p)
    lines = [f"def call({', '.join(names)}):"]
    for tensor in problem.inputs:
        for dim, axis in enumerate(tensor.shape or ()):
            if axis not in bound and f"in_{tensor.name}" in names:
                bound[axis] = f"axis_{axis}"
                lines.append(f"    axis_{axis} = in_{tensor.name}.shape[{dim}]")
    space: dict[str, Any] = {"empty": torch.empty, "function": function}
    for number, tensor in enumerate(problem.outputs):
        space[f"dtype_{number}"] = getattr(torch, tensor.dtype)
        shape = "".join(f"{bound[axis]}, " for axis in tensor.shape or ())
        lines.append(f"    out_{number} = empty(({shape}), dtype=dtype_{number})")
        passed.append(f"out_{number}.data_ptr()")
        types.append(ctypes.c_void_p)
    arguments = problem.c_axes or tuple(problem.axes)
    passed += [re.sub(r"[A-Za-z_]\w*", lambda name: bound[name.group()], text) for text in arguments]
    function.argtypes = types + [ctypes.c_int64] * len(arguments)
    results = ", ".join(f"out_{number}" for number in range(len(problem.outputs)))
    lines += [f"    function({', '.join(passed)})", f"    return {results}"]
    exec("\n".join(lines), space)
    return space["call"]


def _packer(library: ctypes.CDLL, problem: Problem) -> Any:
    axes = [0 if value is None else value for value in problem.axes.values()]
    size, pack = library[f"prepare_{problem.operator}_bytes"], library[f"prepare_{problem.operator}"]
    size.argtypes, size.restype = [ctypes.c_int64] * len(axes), ctypes.c_int64
    constants = [tensor for tensor in problem.inputs if tensor.constant]
    scalar: dict[bool, Any] = {True: ctypes.c_int64, False: ctypes.c_float}
    types: list[Any] = [
        ctypes.c_void_p if t.shape is not None else scalar[t.dtype.startswith("int")] for t in constants
    ]
    pack.argtypes, pack.restype = [*types, ctypes.c_void_p, *[ctypes.c_int64] * len(axes)], None

    def prepare(*given: Any) -> Packed:
        began = time.perf_counter()
        count = max(int(size(*axes)), 1)
        room = torch.empty(count + ALIGNMENT_BYTES, dtype=torch.uint8)
        start = -room.data_ptr() % ALIGNMENT_BYTES
        value = room[start : start + count]
        held = [t.contiguous() if isinstance(t, torch.Tensor) else t for t in given]
        pointers = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in held]
        pack(*pointers, value.data_ptr(), *axes)
        return Packed(value, count, time.perf_counter() - began)

    return prepare
