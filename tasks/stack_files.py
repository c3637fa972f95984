"""A stack as files to deploy: settings, the source of each promoted kernel, and how to put them into a model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.errors import InputError
from kernels.identity import content_hash
from profiles.engines.base import Promoted, Stack
from tasks.codec import from_json, to_json
from tasks.run_state import read_json, write_json

SUFFIX = {"cpp": ".cpp", "torch": ".py", "triton": ".py"}

APPLY = '''"""Put this stack's kernels into a model: `python apply.py MODEL_FOLDER`. Needs the package roofloop."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kernels.overlay import install
from tasks.stack_files import read_stack


def load(model_dir: str, threads: int) -> torch.nn.Module:
    """The model with the promoted kernels in it; `handle.remove()` takes them out again."""
    here = Path(__file__).resolve().parent
    stack = read_stack(here)
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        handle = install(model, stack.kernels, here / "builds", threads)
    for count in handle.counts():
        print(f"{count['problem']}: {count['sites']} sites, {count['prepared_bytes'] / 1e6:.1f} MB packed")
    return model


if __name__ == "__main__":
    load(sys.argv[1], torch.get_num_threads())
'''


def write_stack(stack: Stack, folder: Path, *, note: str = "") -> Path:
    """Write the stack into `folder`, which is replaced as a whole.

    `stack.json` holds the settings and, per kernel, the problem (without the ruler's hidden shapes), the judged shapes
    and the hashes; the sources lie beside it in `kernels/`. `note` says in the README what the stack is worth.
    """
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "kernels").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for kernel in stack.kernels:
        file = kernel_file(kernel)
        (fresh / file).write_text(kernel.candidate.source, encoding="utf-8")
        rows.append(
            {
                "problem": to_json(replace(kernel.problem, hidden=())),
                "judged": [dict(shape) for shape in kernel.judged],
                "verdict_id": kernel.verdict_id,
                "candidate": {key: value for key, value in to_json(kernel.candidate).items() if key != "source"},
                "candidate_id": kernel.candidate.id,
                "file": file,
            }
        )
    head = {"schema_version": 1, "id": stack.id, "settings": to_json(stack.settings), "kernels": rows}
    write_json(fresh / "stack.json", head | {"hash": content_hash(head)})
    (fresh / "apply.py").write_text(APPLY, encoding="utf-8")
    (fresh / "README.md").write_text(_readme(stack, note), encoding="utf-8")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def read_stack(folder: Path) -> Stack:
    """The stack that lies in `folder`.

    Raises:
        InputError: there is none, `stack.json` was edited, or a kernel's source is not the one that was judged.
    """
    held = read_json(folder / "stack.json")
    if not isinstance(held, dict) or held.get("schema_version") != 1:
        raise InputError("there is no stack here that this version can read.", file=folder / "stack.json",
                         remedy="Name a folder that a run wrote: runs/<run>/stack.")  # fmt: skip
    if held.pop("hash", None) != content_hash(held):
        raise InputError("this file was changed after it was written: its hash is another one.",
                         file=folder / "stack.json", remedy="Write it anew with `roofloop report`.")  # fmt: skip
    kernels = []
    for row in held["kernels"]:
        file = folder / row["file"]
        try:
            source = file.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"this kernel cannot be read: {error.strerror}.", file=file,
                             remedy="Copy the whole folder of the run.") from error  # fmt: skip
        kernel = from_json(
            Promoted,
            {
                "problem": row["problem"],
                "candidate": row["candidate"] | {"source": source},
                "verdict_id": row["verdict_id"],
                "judged": row["judged"],
            },
        )
        if kernel.candidate.id != row["candidate_id"]:
            raise InputError("this source is not the one that was judged.", file=file,
                             remedy="Restore the file, or judge the new source with `roofloop judge`.")  # fmt: skip
        kernels.append(kernel)
    stack = from_json(Stack, {"settings": held["settings"], "kernels": ()})
    return replace(stack, kernels=tuple(kernels))


def kernel_file(kernel: Promoted) -> str:
    """Where a kernel's source lies in the stack's folder."""
    suffix = SUFFIX.get(kernel.candidate.language, ".txt")
    return f"kernels/{kernel.problem.operator}-{kernel.candidate.id[:8]}{suffix}"


def _readme(stack: Stack, note: str) -> str:
    knobs = "\n".join(f"- `{name}` = `{value}`" for name, value in stack.settings.knobs.items()) or "- all defaults"
    kernels = "\n".join(f"- `{kernel_file(kernel)}`: {kernel.problem.name}" for kernel in stack.kernels) or "- none"
    return (
        f"# Stack {stack.id}\n\n{note}\n\nEngine `{stack.settings.engine}` with these knobs:\n\n{knobs}\n\n"
        f"Promoted kernels:\n\n{kernels}\n\n`python apply.py MODEL_FOLDER` shows how they are put into a model. "
        "A call whose shape, dtype or device was not judged takes the stock path.\n"
    )
