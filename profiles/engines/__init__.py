"""Engines: started in a child or spoken to over HTTP, behind one protocol (`base.Engine`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels.errors import InputError
from profiles.engines.base import Engine, KnobSpec, Stack
from profiles.workload import Workload

ENGINES = ("transformers", "sglang")


def open_engine(
    workload: Workload, model_dir: Path, stack: Stack, *, children: Path, builds: Path, log: Path, **options: Any
) -> Engine:
    """An engine that is not started yet.

    Args:
        workload: gives dtype, traffic (for warm-up, batch and length limits) and engine.
        model_dir: from `profiles.models.materialise`.
        stack: settings, and the promoted kernels that are put in.
        children: folder for pid files and scratch space.
        builds: where built kernels are cached.
        log: file for the engine's output, appended to.
        options: of the engine's own class: `memory_bytes`, `confinement`, `start_timeout_s`, `reply_timeout_s`.

    Raises:
        InputError: unknown engine or knob, or lengths that exceed the model's context.
    """
    name = stack.settings.engine
    if name == "transformers":
        from profiles.engines.transformers_engine import TransformersEngine

        return TransformersEngine(workload, model_dir, stack, children=children, builds=builds, log=log, **options)
    if name == "sglang":
        from profiles.engines.sglang import SGLangEngine

        return SGLangEngine(workload, model_dir, stack, children=children, builds=builds, log=log, **options)
    raise _unknown(name)


def knob_specs(workload: Workload, model_dir: Path) -> tuple[KnobSpec, ...]:
    """What the settings search may turn for this workload on this machine; `workload.engine.search` comes first.

    Raises:
        InputError: unknown engine, or a `search` key that is no knob of it.
    """
    name = workload.engine.name
    if name == "transformers":
        from profiles.engines import transformers_knobs

        specs = transformers_knobs.knob_specs(workload, model_dir)
    elif name == "sglang":
        from profiles.engines import sglang

        specs = sglang.knob_specs(workload, model_dir)
    else:
        raise _unknown(name)
    search = workload.engine.search
    for key in set(search) - {spec.name for spec in specs}:
        known = ", ".join(spec.name for spec in specs)
        raise InputError("This machine offers no such knob.", remedy=f"Known: {known}.", key=f"engine.search.{key}")
    kept = (spec for spec in specs if search.get(spec.name, spec.choices))
    return tuple(
        spec.model_copy(update={"choices": tuple(dict.fromkeys((spec.default, *search.get(spec.name, spec.choices))))})
        for spec in kept
    )


def _unknown(name: str) -> InputError:
    return InputError(f"Unknown engine {name!r}.", remedy=f"Known: {', '.join(ENGINES)}.", key="engine.name")
