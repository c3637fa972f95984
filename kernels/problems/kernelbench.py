"""KernelBench files: `Model`, `get_inputs`, `get_init_inputs`; a candidate is a file with `ModelNew`.

The file is somebody else's code, so it runs only in a child of its own (isolated interpreter, empty environment, limits
on time, memory and files), which reports shapes and dtypes as one line of JSON. The Problem's reference is the file's
source and an adapter `run`; both models draw their weights under the same seed, as KernelBench does.
"""

from __future__ import annotations

import ast
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from kernels.errors import InputError
from kernels.ruler.spec import DTYPES, Candidate, Cost, Problem, Tensor

_ADAPTER = """

_roofloop_models = {{}}


def run(*inputs):
    import torch

    dtype = next((t.dtype for t in inputs if torch.is_tensor(t) and t.is_floating_point()), torch.float32)
    if dtype not in _roofloop_models:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            _roofloop_models[dtype] = {model}(*get_init_inputs()).eval().to(dtype)
    with torch.no_grad():
        return _roofloop_models[dtype](*inputs)
"""

_PROBE = """
import json, sys, torch
space = {"__name__": "kernelbench_file"}
exec(compile(sys.stdin.read(), "file", "exec"), space)
torch.manual_seed(0)
inputs = space["get_inputs"]()
outputs = space["run"](*inputs)
outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
tell = lambda t: ["tensor", list(t.shape), str(t.dtype)[6:]] if torch.is_tensor(t) else ["scalar", type(t).__name__, t]
print("\\n" + json.dumps([[tell(t) for t in inputs], [tell(t) for t in outputs]]))
"""

_MEMORY_BYTES = 16 << 30


def load(path: Path, *, timeout_s: float = 120.0) -> Problem:
    """The Problem that a KernelBench file describes: all axes constant, one visible shape.

    Raises:
        InputError: a missing part, or a file that does not run within the limits.
    """
    source = _source(path)
    names = _top_level(path, source)
    for needed in ("Model", "get_inputs", "get_init_inputs"):
        if needed not in names:
            raise InputError(
                "The file does not define this.", remedy="A KernelBench file has Model, get_inputs, get_init_inputs.",
                file=path, key=needed,
            )  # fmt: skip
    reference = source + _ADAPTER.format(model="Model")
    inputs, outputs = _probe(path, reference, timeout_s)
    axes: dict[str, int | None] = {}
    scalars: dict[str, float | int] = {}
    ins = tuple(_tensor(path, f"x{i}", told, axes, scalars) for i, told in enumerate(inputs))
    outs = tuple(_tensor(path, f"y{i}", told, axes, {}) for i, told in enumerate(outputs))
    operator = path.stem.lstrip("0123456789_").lower() or path.stem.lower()
    return Problem(
        name=path.stem,
        operator=operator,
        axes=axes,
        inputs=ins,
        outputs=outs,
        reference=reference,
        cost=Cost("0", _bytes(ins), _bytes(outs)),
        visible=({},),
        scalars=scalars,
        description=f"KernelBench file {path.name}; its operation count is not known, only its bytes.",
    )


def load_candidate(path: Path) -> Candidate:
    """The candidate in a file with `ModelNew` (and the `get_init_inputs` that its problem's file has).

    Raises:
        InputError: no `ModelNew` or no `get_init_inputs`.
    """
    source = _source(path)
    names = _top_level(path, source)
    for needed in ("ModelNew", "get_init_inputs"):
        if needed not in names:
            raise InputError("The file does not define this.", remedy="Add it to the file.", file=path, key=needed)
    return Candidate(
        language="torch", source=source + _ADAPTER.format(model="ModelNew"), entry="run", origin=f"file:{path.name}"
    )


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The file cannot be read ({error}).", remedy="Give a Python file.", file=path) from error


def _top_level(path: Path, source: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise InputError(f"This is not Python: {error}.", remedy="Mend the file.", file=path) from error
    defined = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, defined)}


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _probe(path: Path, source: str, timeout_s: float) -> tuple[list[Any], list[Any]]:
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", _PROBE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={}, cwd="/", text=True, start_new_session=True, preexec_fn=_limit,  # noqa: PLW1509 (no threads touch it)
    )  # fmt: skip
    try:
        out, err = child.communicate(source, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"The file did not finish within {timeout_s:g} s.", remedy="Make get_inputs smaller.", file=path
        ) from error
    finally:
        _kill_group(child)
    if child.returncode != 0:
        last = (err.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise InputError(f"The file does not run: {last}", remedy="Run it by hand and mend it.", file=path)
    inputs, outputs = json.loads(out.strip().splitlines()[-1])
    return inputs, outputs


def _kill_group(child: subprocess.Popen[str]) -> None:
    import os
    import signal
    from contextlib import suppress

    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def _tensor(
    path: Path, name: str, told: list[Any], axes: dict[str, int | None], scalars: dict[str, float | int]
) -> Tensor:
    if told[0] == "scalar":
        if told[1] not in ("int", "float", "bool"):
            raise InputError(
                f"An input or output is a {told[1]}.", remedy="Tensors and numbers are supported.", file=path, key=name
            )
        scalars[name] = told[2]
        return Tensor(name, None, "float32" if told[1] == "float" else "int64")
    if told[2] not in DTYPES:
        raise InputError(
            f"The dtype {told[2]} is not supported.", remedy=f"One of {', '.join(DTYPES)}.", file=path, key=name
        )
    for size in told[1]:
        axes[f"d{size}"] = size
    return Tensor(name, tuple(f"d{size}" for size in told[1]), told[2])


def _bytes(tensors: tuple[Tensor, ...]) -> str:
    from kernels.problems.flashinfer import _bytes as count

    return count(tensors)
