"""FlashInfer-Trace JSON: read a Definition (with its Workloads) as a Problem, write a Problem and a Candidate.

What a Definition has no field for travels in its tags: `constant:<input>` for a weight, `resident:<input>` for what
stays in memory between two uses, `high:<input>:<expression>` for the bound of integers, `flops:<expression>` and
`reduction:<axis>`. Workloads are JSON lines of traces, looked for beside the definition (`name.jsonl`) and in the data
set's own place (`workloads/<op_type>/<name>.jsonl` next to `definitions/`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.errors import InputError
from kernels.problems.hidden import hidden_shapes
from kernels.ruler.spec import DTYPES, Candidate, Cost, Problem, Tensor

_SIZE = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

Json = dict[str, Any]


def load_definition(path: Path, *, seed: int | None = None) -> Problem:
    """The Problem that a Definition file describes.

    Raises:
        InputError: not JSON, a missing or wrong field, an unsupported dtype, a reference without `run`, or variable
            axes without a Workload.
    """
    data = _json(path)
    for key in ("name", "axes", "inputs", "outputs", "reference"):
        if not data.get(key):
            raise InputError(
                "The definition lacks this field.", remedy="See the FlashInfer-Trace schema.", file=path, key=key
            )
    _check_reference(path, data["reference"])
    axes = _axes(path, data["axes"])
    tags = [str(tag) for tag in data.get("tags") or ()]
    constants = {tag.partition(":")[2] for tag in tags if tag.startswith("constant:")}
    flops = next((tag.partition(":")[2] for tag in tags if tag.startswith("flops:")), "0")
    highs = dict(tag.split(":", 2)[1:] for tag in tags if tag.startswith("high:") and tag.count(":") >= 2)
    inputs = tuple(
        replace(tensor, high=highs.get(tensor.name), resident=f"resident:{tensor.name}" in tags)
        for tensor in _tensors(path, data["inputs"], axes, "inputs", constants)
    )
    outputs = _tensors(path, data["outputs"], axes, "outputs", set())
    workloads = _workloads(path, data)
    variable = tuple(axis for axis, value in axes.items() if value is None)
    visible = tuple({axis: int(work["axes"][axis]) for axis in variable} for work in workloads) or ({},)
    if variable and not workloads:
        raise InputError(
            f"The axes {', '.join(variable)} vary and no workload gives them sizes.",
            remedy=f"Put workloads beside it as {path.with_suffix('.jsonl').name}, one JSON object a line.",
            file=path,
            key="axes",
        )
    first = next(iter(tensor.dtype for tensor in inputs if tensor.shape is not None), "float32")
    return Problem(
        name=data["name"],
        operator=str(data.get("op_type") or data.get("type") or data["name"]),
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=data["reference"],
        cost=Cost(flops, _bytes(inputs), _bytes(outputs), first if first in ("bfloat16", "float16") else "float32"),
        visible=visible,
        hidden=hidden_shapes(visible, variable, seed=_seed(seed)),
        scalars=_scalars(path, inputs, workloads),
        reduction_axes=tuple(tag.partition(":")[2] for tag in tags if tag.startswith("reduction:")),
        description=str(data.get("description") or ""),
    )


def definition(problem: Problem) -> Json:
    """`problem` as a Definition. Hidden shapes are not in it."""
    tags = [f"constant:{tensor.name}" for tensor in problem.inputs if tensor.constant]
    tags += [f"resident:{tensor.name}" for tensor in problem.inputs if tensor.resident]
    tags += [f"high:{tensor.name}:{tensor.high}" for tensor in problem.inputs if tensor.high is not None]
    tags += [f"flops:{problem.cost.flops}", *(f"reduction:{axis}" for axis in problem.reduction_axes)]
    out: Json = {
        "name": problem.name,
        "op_type": problem.operator,
        "tags": tags,
        "axes": {
            axis: {"type": "var"} if value is None else {"type": "const", "value": value}
            for axis, value in problem.axes.items()
        },
        "inputs": {t.name: {"shape": t.shape and list(t.shape), "dtype": t.dtype} for t in problem.inputs},
        "outputs": {t.name: {"shape": t.shape and list(t.shape), "dtype": t.dtype} for t in problem.outputs},
        "reference": problem.reference,
    }
    return out | ({"description": problem.description} if problem.description else {})


def workloads(problem: Problem) -> list[Json]:
    """The visible shapes of `problem` as lines of a workload file."""
    scalar = {name: {"type": "scalar", "value": value} for name, value in problem.scalars.items()}
    inputs = {tensor.name: scalar.get(tensor.name, {"type": "random"}) for tensor in problem.inputs}
    return [
        {
            "definition": problem.name,
            "workload": {"axes": dict(shape), "inputs": inputs, "uuid": f"{problem.id[:16]}-{number}"},
            "solution": None,
            "evaluation": None,
        }
        for number, shape in enumerate(problem.visible)
    ]


def solution(candidate: Candidate, problem: Problem, *, hardware: str = "cpu") -> Json:
    """`candidate` as a Solution of `problem`."""
    file = "kernel.cpp" if candidate.language == "cpp" else "kernel.py"
    return {
        "name": f"{problem.name}_{candidate.id[:12]}",
        "definition": problem.name,
        "author": candidate.origin or "unknown",
        "spec": {
            "language": {"cpp": "cpp", "triton": "triton", "torch": "python"}[candidate.language],
            "target_hardware": [hardware],
            "entry_point": f"{file}::{candidate.entry}",
            "dependencies": [],
        },
        "sources": [{"path": file, "content": candidate.source}],
        "description": json.dumps({"prepares": candidate.prepares, "parameters": dict(candidate.parameters)}),
    }


def load_solution(path: Path) -> Candidate:
    """The Candidate that a Solution file holds.

    Raises:
        InputError: not JSON, a missing field, a language that is not run here, or more than one source file.
    """
    data = _json(path)
    try:
        language, entry = data["spec"]["language"], data["spec"]["entry_point"]
        sources = {source["path"]: source["content"] for source in data["sources"]}
        file, _, function = entry.partition("::")
        source = sources[file]
    except (KeyError, TypeError) as error:
        raise InputError(
            f"The solution lacks {error}.", remedy="See the FlashInfer-Trace schema of a Solution.", file=path
        ) from error
    ours = {"cpp": "cpp", "triton": "triton", "python": "torch"}.get(language)
    if ours is None or len(sources) != 1:
        raise InputError(
            f"A solution in {language!r} with {len(sources)} files is not run here.",
            remedy="One file in cpp, triton or python.",
            file=path,
            key="spec.language",
        )
    try:
        extra = json.loads(data.get("description") or "{}")
    except ValueError:
        extra = {}
    extra = extra if isinstance(extra, dict) else {}
    return Candidate(
        language=ours,
        source=source,
        entry=function,
        prepares=bool(extra.get("prepares", False)),
        parameters=extra.get("parameters") or {},
        origin=str(data.get("author", "")) or f"file:{path}",
    )


def _json(path: Path) -> Json:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"This is not readable JSON ({error}).", remedy="Give a FlashInfer-Trace file.", file=path
        ) from error
    if not isinstance(data, dict):
        raise InputError("The file does not hold an object.", remedy="Give a FlashInfer-Trace file.", file=path)
    return data


def _check_reference(path: Path, source: str) -> None:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise InputError(
            f"The reference is not Python: {error}.", remedy="Mend it.", file=path, key="reference"
        ) from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
        raise InputError(
            "The reference has no function `run`.", remedy="Define run(*inputs).", file=path, key="reference"
        )


def _axes(path: Path, axes: Mapping[str, Any]) -> dict[str, int | None]:
    out: dict[str, int | None] = {}
    for axis, spec in axes.items():
        kind = spec.get("type") if isinstance(spec, dict) else None
        if kind == "var":
            out[axis] = None
        elif kind == "const" and isinstance(spec.get("value"), int) and spec["value"] > 0:
            out[axis] = spec["value"]
        else:
            raise InputError(
                f"The axis is {spec!r}.",
                remedy="Use {type: var} or {type: const, value: N}.",
                file=path,
                key=f"axes.{axis}",
            )
    return out


def _tensors(
    path: Path, specs: Mapping[str, Any], axes: Mapping[str, Any], where: str, constants: set[str]
) -> tuple[Tensor, ...]:
    out = []
    for name, spec in specs.items():
        dtype, shape = spec.get("dtype"), spec.get("shape")
        if dtype not in DTYPES:
            raise InputError(
                f"The dtype {dtype!r} is not supported.",
                remedy=f"One of {', '.join(DTYPES)}.",
                file=path,
                key=f"{where}.{name}",
            )
        for axis in shape or ():
            if axis not in axes:
                raise InputError(
                    f"The axis {axis!r} is not declared.", remedy="Add it.", file=path, key=f"{where}.{name}"
                )
        out.append(Tensor(name, None if shape is None else tuple(shape), dtype, name in constants))
    return tuple(out)


def _workloads(path: Path, data: Json) -> list[Json]:
    places = [path.with_suffix(".jsonl")]
    if len(path.parents) >= 3:
        places.append(path.parents[2] / "workloads" / path.parent.name / f"{data['name']}.jsonl")
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return []
    out = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            work = json.loads(line)["workload"]
            missing = [a for a, spec in data["axes"].items() if spec["type"] == "var" and not work["axes"].get(a)]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"Line {number} is not a workload ({error}).", remedy="Mend the line.", file=file
            ) from error
        if missing:
            raise InputError(f"Line {number} gives no size to {missing[0]!r}.", remedy="Add it.", file=file, key="axes")
        out.append(work)
    return out


def _scalars(path: Path, inputs: tuple[Tensor, ...], workloads: list[Json]) -> dict[str, float | int]:
    given = workloads[0].get("inputs", {}) if workloads else {}
    out = {}
    for tensor in inputs:
        if tensor.shape is None:
            value = given.get(tensor.name, {}).get("value")
            if not isinstance(value, int | float):
                raise InputError(
                    "The scalar input has no value in the first workload.",
                    remedy='Give it as {"type": "scalar", "value": …}.',
                    file=path,
                    key=f"inputs.{tensor.name}",
                )
            out[tensor.name] = value
    return out


def _bytes(tensors: tuple[Tensor, ...]) -> str:
    terms = ["*".join((str(_SIZE[t.dtype]), *t.shape)) for t in tensors if t.shape is not None]
    return "+".join(terms) or "0"


def _seed(seed: int | None) -> int:
    import secrets

    return secrets.randbits(64) if seed is None else seed
