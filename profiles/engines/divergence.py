"""Finds the first module of a model that computes something else than the clean float32 model.

Both models run side by side: the clean one runs a batch, and each module of the other is then given, alone, the very
inputs that its counterpart had. So no error of an earlier layer is passed on, and the tolerance is that of a single
module: a few dozen roundings of the dtype.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from profiles.engines.child import Channel

TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.08}
"""Largest ‖a − b‖ / ‖b‖ of one module, by dtype: some 20 units of last place (2⁻⁸ for bfloat16), since an attention or
MLP block rounds a handful of times; float32 leaves room for other orders of summation."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A module whose output differs."""

    module: str
    """Path in the model: `model.layers.3.input_layernorm`."""
    kind: str
    """Class of the module: `LlamaRMSNorm`."""
    relative_error: float
    """‖a − b‖ / ‖b‖; infinity where the module raises, gives another shape, or something not finite."""
    tolerance: float
    note: str = ""


@torch.no_grad()
def first_divergence(clean: nn.Module, model: nn.Module, ids: torch.Tensor) -> Divergence | None:
    """The first module, in the order of execution and inner ones first, that differs from its counterpart.

    Args:
        clean: the float32 model as transformers makes it.
        model: the one under suspicion: another dtype, other weights, promoted kernels.
        ids: token ids, int64 of shape [sequences, length].
    """
    dtype = next(model.parameters()).dtype
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], torch.Tensor]] = []

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                calls.append((name, args, dict(kwargs), tensor.detach().clone()))

        return hook

    hooks = [m.register_forward_hook(record(name), with_kwargs=True) for name, m in clean.named_modules() if name]
    try:
        clean(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    modules = dict(model.named_modules())
    for name, args, kwargs, expected in calls:
        module = modules.get(name)
        if module is None:
            return Divergence(name, "missing", float("inf"), tolerance, "the model has no such module")
        kind = type(module).__name__
        try:
            found = _first_tensor(module(*_cast(args, dtype), **_cast(kwargs, dtype)))
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            return Divergence(name, kind, float("inf"), tolerance, note)
        if found is None or found.shape != expected.shape:
            return Divergence(name, kind, float("inf"), tolerance, "the output has another shape")
        error_norm = torch.linalg.vector_norm(found.double() - expected.double())
        relative = float(error_norm / torch.linalg.vector_norm(expected.double()).clamp(min=1e-30))
        if not relative <= tolerance:
            return Divergence(name, kind, relative if math.isfinite(relative) else float("inf"), tolerance)
    return None


def serve(channel: Channel) -> None:
    """Entry of a child: loads both models, puts promoted kernels into one of them, answers with the divergence."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from profiles.engines.transformers_worker import confine, promoted_from_json

    start = channel.receive()
    if start is None:
        return
    try:
        confine(start)
        torch.set_num_threads(start["threads"])
        logging.disable_progress_bar()
        clean, model = (
            AutoModelForCausalLM.from_pretrained(
                start["model_dir"], dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
            ).eval()
            for dtype in ("float32", start["dtype"])
        )
        if start["promoted"]:
            from kernels.overlay import install

            promoted = [promoted_from_json(item) for item in start["promoted"]]
            install(model, promoted, Path(start["builds"]), start["threads"])
        found = first_divergence(clean, model, torch.tensor(start["sequences"]))
    except Exception as error:
        channel.send({"failure": "crash", "detail": f"{type(error).__name__}: {error}"})
        return
    answer = None
    if found is not None:
        answer = dataclasses.asdict(found)
        if found.relative_error == float("inf"):
            answer["relative_error"] = None
    channel.send({"divergence": answer})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((item for item in items if isinstance(item, torch.Tensor)), None)
