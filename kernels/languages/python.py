"""Python sources, with torch operators or Triton kernels: each is executed in a module of its own.

Triton runs on CPU tensors only in its interpreter, which it chooses when it is imported: the process must be started
with `TRITON_INTERPRET=1`. That tells whether a kernel is right, not how fast it is.
"""

from __future__ import annotations

import linecache
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

from kernels.errors import InputError
from kernels.languages.loaded import Loaded, Packed
from kernels.ruler.spec import Candidate, Problem


def load(path: Path, problem: Problem, candidate: Candidate) -> Loaded:
    """Execute the source at `path` as a fresh module and take its entry point.

    Raises:
        InputError: a Triton candidate in a process without a GPU that was not started with `TRITON_INTERPRET=1`.
        AttributeError: the module lacks the entry point, or `prepare` where the candidate prepares.
        Exception: whatever the module raises when it is executed.
    """
    if candidate.language == "triton" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError(
            "A Triton kernel needs a GPU or Triton's interpreter.",
            remedy="Start the process with TRITON_INTERPRET=1.",
            key=candidate.origin or candidate.entry,
        )
    source = path.read_text(encoding="utf-8")
    name = f"candidate_{candidate.id[:16]}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    # Triton and torch.compile look up the source of functions they translate.
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    run = getattr(module, candidate.entry)
    return Loaded(candidate, problem, run, _packer(module.prepare) if candidate.prepares else None)


def _packer(prepare: Any) -> Any:
    def pack(*constants: Any) -> Packed:
        began = time.perf_counter()
        value = prepare(*constants)
        parts = value if isinstance(value, (tuple, list)) else (value,)
        size = sum(t.numel() * t.element_size() for t in parts if isinstance(t, torch.Tensor))
        return Packed(value, size, time.perf_counter() - began)

    return pack
