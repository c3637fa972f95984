"""The knobs of the `transformers` engine: what there is, what this machine offers, what does not go together."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from kernels.errors import InputError
from profiles.engines.base import EngineFailure, Knob, KnobSpec
from profiles.workload import Workload

DEFAULTS: dict[str, Knob] = {
    "threads": 0,
    "wait_policy": "default",
    "replicas": 1,
    "max_batch": 0,
    "scheduler": "static",
    "cache": "dynamic",
    "attention": "sdpa",
    "torch_compile": False,
    "prompt_lookup": 0,
}
"""Stock. `threads` 0: all physical cores, which is what torch takes by itself (an equal share of them with replicas);
`max_batch` 0: the workload's concurrency (an equal share of it with replicas). `scheduler` static is the faster of the
two stock paths: 108 against 90 output tokens/s (SmolLM2 bfloat16, 8 × 128 in, 128 out, 2 cores).
"""

_CHOICES: dict[str, tuple[Knob, ...]] = {
    "wait_policy": ("default", "passive", "active"),
    "scheduler": ("static", "continuous"),
    "cache": ("dynamic", "static"),
    "attention": ("sdpa", "eager"),
    "torch_compile": (False, True),
}


def cores() -> int:
    """Physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


PROMISING = ("cache", "prompt_lookup", "wait_policy", "replicas", "scheduler", "threads", "max_batch", "attention")
"""Order of the search: what gave most on CPUs first, since a short budget only tries the first few."""


def knob_specs(workload: Workload, model_dir: Path) -> tuple[KnobSpec, ...]:
    """What the settings search may turn on this machine for this workload, the most promising first; the default is
    stock.
    """
    many = cores()
    powers = {2**i for i in range(many.bit_length()) if 2**i <= many}
    concurrency = workload.traffic.concurrency if workload.traffic.mode == "closed" else 32
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    # Each replica holds weights of its own and some 600 MB of interpreter and libraries.
    fit = max(1, int(psutil.virtual_memory().available * 0.7 // (1.3 * weights + 600e6)))
    replicas = tuple(sorted(n for n in powers if n <= min(fit, concurrency)))
    batches = {max(1, concurrency // 2), concurrency} | (
        {2 * concurrency} if workload.traffic.mode == "open" else set()
    )
    specs = [
        KnobSpec(
            name="threads",
            choices=(0, *sorted(n for n in powers if n < many)),
            default=0,
            help="OpenMP threads of each replica; 0: the cores shared by the replicas",
            interacts_with=("linear", "attention"),
        ),
        KnobSpec(
            name="wait_policy",
            choices=_CHOICES["wait_policy"],
            default="default",
            help="what OpenMP threads do between two regions: spin (active) or sleep (passive)",
            interacts_with=("linear",),
        ),
        KnobSpec(
            name="max_batch",
            choices=(0, *sorted(batches - {0})),
            default=0,
            help="most requests of one batch in each replica; 0: the workload's concurrency shared by the replicas",
            interacts_with=("linear", "attention"),
        ),
        KnobSpec(
            name="scheduler",
            choices=_CHOICES["scheduler"],
            default="static",
            help="batches to their end, or transformers' continuous batching",
            interacts_with=("linear", "attention"),
        ),
        KnobSpec(
            name="cache",
            choices=_CHOICES["cache"],
            default="dynamic",
            help="KV cache that grows, or one of fixed size; of the static scheduler",
            interacts_with=("attention",),
        ),
        KnobSpec(
            name="attention",
            choices=_CHOICES["attention"],
            default="sdpa",
            help="torch's fused attention, or transformers' own in plain operators",
            interacts_with=("attention",),
        ),
    ]
    if len(replicas) > 1:
        specs.insert(
            2,
            KnobSpec(
                name="replicas",
                choices=replicas,
                default=1,
                help="engine processes that share the requests; replicas × threads must fit the cores",
                interacts_with=("linear", "attention"),
            ),
        )
    # torch_compile can be set, and is not searched: its first start takes longer than many a trial may.
    if concurrency == 1:
        specs.append(
            KnobSpec(
                name="prompt_lookup",
                choices=(0, 3, 8),
                default=0,
                help="tokens drafted from the prompt at each step (speculation; batch 1 only)",
                interacts_with=("linear",),
            )
        )
    return tuple(sorted(specs, key=lambda spec: PROMISING.index(spec.name)))


def resolve(knobs: Mapping[str, Knob], workload: Workload, model_dir: Path) -> dict[str, Knob]:
    """All knobs with a value. Raises InputError on an unknown knob or a value that it cannot have."""
    for name, value in knobs.items():
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, DEFAULTS, 1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise InputError(
                "The engine `transformers` has no such knob.",
                remedy=f"{hint}Known: {', '.join(DEFAULTS)}.",
                key=f"engine.knobs.{name}",
            )
        default = DEFAULTS[name]
        allowed = _CHOICES.get(name)
        wrong_type = type(value) is not type(default)
        if wrong_type or (allowed is not None and value not in allowed) or (isinstance(value, int) and value < 0):
            what = f"one of {', '.join(map(repr, allowed))}" if allowed else "a whole number, 0 or more"
            raise InputError(f"{value!r} is not possible.", remedy=f"Give {what}.", key=f"engine.knobs.{name}")
    values = {**DEFAULTS, **knobs}
    replicas = max(1, int(values["replicas"]))
    values["replicas"] = replicas
    if not values["threads"]:  # said outright: inside the sandbox the libraries' own count comes out wrong
        values["threads"] = max(1, cores() // replicas)
    if not values["max_batch"]:
        traffic = workload.traffic
        values["max_batch"] = -(-(traffic.concurrency if traffic.mode == "closed" else 32) // replicas)
    return values


def refuse(values: Mapping[str, Knob], kernels: int) -> None:
    """Raise EngineFailure (`refused`) where settings do not go together, before anything is started."""
    threads, replicas = int(values["threads"]), int(values["replicas"])
    reason = ""
    if threads * replicas > max(cores(), len(os.sched_getaffinity(0))):
        reason = f"{replicas} replicas of {threads} threads need more than the {cores()} cores there are"
    elif values["prompt_lookup"] and values["max_batch"] != 1:
        reason = "prompt_lookup works at max_batch 1 only"
    elif values["prompt_lookup"] and (values["scheduler"] != "static" or values["torch_compile"]):
        reason = "prompt_lookup needs the static scheduler without torch_compile"
    elif values["torch_compile"] and (values["scheduler"] != "static" or values["cache"] != "static"):
        reason = "torch_compile needs the static scheduler and the static cache"
    elif values["torch_compile"] and kernels:
        reason = "promoted kernels are not put into a compiled decode step"
    elif values["cache"] == "static" and values["scheduler"] == "continuous":
        reason = "continuous batching has a paged cache of its own"
    if reason:
        raise EngineFailure("refused", reason)
