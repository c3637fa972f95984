"""Inside the engine's process: where the time of one round goes, module by module.

Three rounds of the same requests: untouched (wall time), with a stopwatch around every operator's site, and with
torch's profiler on during a few forwards (which torch operators run inside each site). The stopwatch takes its own time
out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernels.errors import InputError

SCHEMA_VERSION = 2
LENGTH_STEP = 64
"""Lengths of the cache are grouped up to a multiple of this; the mean length of each group is kept."""
TRACED = {"prefill": (0, 1), "decode": (1, 2)}
"""Which forwards of each phase torch's profiler sees: index from, up to and including."""

Axes = tuple[int, ...]
AXES = {
    "rmsnorm": ("rows", "cols"),
    "linear": ("m", "n", "k"),
    "mlp": ("m", "hidden", "inner"),
    "rotary": ("rows", "heads", "kv_heads", "dim"),
    "attention": ("batch", "heads", "kv_heads", "queries", "dim", "length"),
    "cache_update": ("batch", "kv_heads", "new", "dim", "length"),
    "embedding": ("rows", "cols"),
    "attention_glue": ("rows", "cols"),
    "residual_add": ("rows", "cols"),
    "rotary_table": ("rows", "dim"),
    "model_glue": ("rows", "cols"),
    "head_glue": ("rows", "cols"),
}
"""Axes of each kind of site. Where the last one is `length`, it is grouped."""


@dataclass(frozen=True)
class Site:
    """One callable of the model or of the library around it, and what it computes."""

    owner: Any
    attribute: str
    operator: str
    role: str
    path: str
    """Where it stands, with `*` for the number of a layer: `model.layers.*.mlp.gate_proj`."""
    describe: Callable[[tuple[Any, ...], dict[str, Any], Any], tuple[str, Axes]]
    """Dtype and axis values from arguments and result."""
    outermost: bool = False
    """True for a whole forward: it says which phase this is."""


def collect_in_child(model: nn.Module, run: Callable[[], None]) -> dict[str, Any]:
    """Attribute the time of `run` to operators.

    Args:
        model: the live Llama-like model that `run` uses, on the CPU; stock or with an overlay.
        run: serves the requests once. Called three times; must do the same work each time.

    Returns:
        Plain JSON: `wall_s` (untouched), `watched_wall_s` (with stopwatches, their own time taken out), `overhead_s`,
        `rows` (operator, role, phase, dtype, axes, calls, self_s, total_s, inner_calls, kernel, mean length), `aten`
        (torch operators inside, seconds over `forwards` traced forwards), `model` (sizes), `compiled`, `threads`.

    Raises:
        InputError: the model is not on the CPU, where a stopwatch around a call would not see what the call started.
    """
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise InputError("the model is not on the CPU.", remedy="Profile it with the device's own profiler.")
    sites = list(_sites(model))
    wall_s = _seconds(run)
    watch = _Stopwatch(sites)
    with _eager(), _wrapped(sites, watch.wrap):
        watched_s = _seconds(run)
    tracer = _Tracer()
    with _eager(), _wrapped(sites, tracer.wrap):
        run()
    inner_s, outer_s = watch.residual()
    rows, residual_s = watch.rows(inner_s, outer_s)
    return {
        "schema_version": SCHEMA_VERSION,
        "wall_s": wall_s,
        "watched_wall_s": watched_s - watch.own_ns / 1e9 - residual_s,
        "overhead_s": watch.own_ns / 1e9 + residual_s,
        "threads": torch.get_num_threads(),
        "compiled": _has_compiled(),
        "model": _sizes(model),
        "forwards": dict(watch.forwards),
        "rows": rows,
        "traced_forwards": dict(tracer.traced),
        "aten": tracer.rows(sites),
    }


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled graphs hide their operators: for the watched rounds the model runs as it is written."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _has_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo and dynamo.counters["stats"].get("unique_graphs"))


@contextlib.contextmanager
def _wrapped(sites: list[Site], wrap: Callable[[int, Site, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Every site's callable replaced, and put back whatever happens."""
    before = []
    try:
        for index, site in enumerate(sites):
            own = vars(site.owner).get(site.attribute)
            wrapped = wrap(index, site, getattr(site.owner, site.attribute) if own is None else own)
            before.append((site, own))
            setattr(site.owner, site.attribute, wrapped)
        yield
    finally:
        for site, own in reversed(before):
            if own is None:
                delattr(site.owner, site.attribute)
            else:
                setattr(site.owner, site.attribute, own)


class _Local(threading.local):
    """Per thread: the calls in progress, and of the forward the phase and whether torch's profiler sees it."""

    def __init__(self) -> None:
        self.stack: list[list[int]] = []
        self.phase = "decode"
        self.traced = False


class _Stopwatch:
    """Self time per site, phase and shape. What happens between a wrapper's entry and the call is its own time."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self.own_ns = 0
        self.forwards: Counter[str] = Counter()
        self.cells: dict[tuple[Any, ...], list[int]] = {}
        self.local = _Local()

    def wrap(self, index: int, site: Site, function: Callable[..., Any]) -> Callable[..., Any]:
        local, cells, clock, describe = self.local, self.cells, time.perf_counter_ns, site.describe
        grouped = AXES[site.operator][-1] == "length"
        kernel = str(getattr(function, "overlay", ""))

        def timed(*args: Any, **kwargs: Any) -> Any:
            entered = clock()
            stack = local.stack
            if site.outermost and not stack:
                local.phase = phase_of(args, kwargs)
                self.forwards[local.phase] += 1
            frame = [0, 0]  # time and number of the calls inside
            stack.append(frame)
            began = clock()
            try:
                result = function(*args, **kwargs)
            finally:
                ended = clock()
                stack.pop()
            dtype, axes = describe(args, kwargs, result)
            length = 0
            if grouped:
                length = axes[-1]
                axes = (*axes[:-1], -(-length // LENGTH_STEP) * LENGTH_STEP)
            # one row per role and shape: the layers of a model are alike
            key = (site.operator, site.role, site.path, local.phase, dtype, axes, kernel)
            cell = cells.get(key)
            if cell is None:
                cell = cells[key] = [0, 0, 0, 0, 0]
            total = ended - began
            cell[0] += 1
            cell[1] += total - frame[0]
            cell[2] += total
            cell[3] += frame[1]
            cell[4] += length
            left = clock()
            self.own_ns += left - entered - total
            if stack:
                stack[-1][0] += left - entered
                stack[-1][1] += 1
            return result

        return timed

    def residual(self, calls: int = 2000) -> tuple[float, float]:
        """Seconds per call that the stopwatch cannot see of itself: (inside the timed span, outside of it)."""

        def nothing(x: torch.Tensor) -> None:
            return None

        x = torch.empty(1, 1)
        site = Site(None, "", "rmsnorm", "", "", lambda args, kwargs, result: ("float32", tuple(args[0].shape)))
        watch = _Stopwatch([site])
        timed = watch.wrap(0, site, nothing)
        timed(x)
        watch.cells.clear()
        watch.own_ns = 0
        began = time.perf_counter_ns()
        for _ in range(calls):
            nothing(x)
        plain = time.perf_counter_ns() - began
        began = time.perf_counter_ns()
        for _ in range(calls):
            timed(x)
        whole = time.perf_counter_ns() - began
        (cell,) = watch.cells.values()
        inside = max(0.0, (cell[1] - plain) / calls)
        outside = max(0.0, (whole - watch.own_ns - cell[1]) / calls)
        return inside / 1e9, outside / 1e9

    def rows(self, inner_s: float, outer_s: float) -> tuple[list[dict[str, Any]], float]:
        """One row per cell, corrected, and the seconds of overhead that the correction took out."""
        rows, removed = [], 0.0
        for (operator, role, path, phase, dtype, axes, kernel), cell in self.cells.items():
            calls, self_ns, total_ns, inner_calls, length = cell
            overhead = min(self_ns / 1e9, calls * inner_s + inner_calls * outer_s)
            removed += overhead
            rows.append(
                {
                    "operator": operator, "role": role, "site": path, "phase": phase, "dtype": dtype,
                    "kernel": kernel,
                    "axes": dict(zip(AXES[operator], axes, strict=True)), "calls": calls,
                    "self_s": self_ns / 1e9 - overhead, "total_s": total_ns / 1e9, "inner_calls": inner_calls,
                    "mean_length": length / calls if length else None,
                }
            )  # fmt: skip
        return rows, removed


class _Tracer:
    """torch's profiler, on during a few forwards: which torch operators run inside each site."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.traced: Counter[str] = Counter()
        self.found: dict[tuple[int, str, str], list[Any]] = defaultdict(lambda: [0, 0.0, Counter()])
        self.local = _Local()

    def wrap(self, index: int, site: Site, function: Callable[..., Any]) -> Callable[..., Any]:
        local, name = self.local, f"roofloop:{index}"

        def traced(*args: Any, **kwargs: Any) -> Any:
            if local.stack:
                with torch.profiler.record_function(name) if local.traced else contextlib.nullcontext():
                    return function(*args, **kwargs)
            if not site.outermost:
                return function(*args, **kwargs)
            phase = phase_of(args, kwargs)
            first, last = TRACED[phase]
            local.traced = first <= self.seen[phase] <= last
            self.seen[phase] += 1
            local.stack.append([])
            if not local.traced:
                try:
                    return function(*args, **kwargs)
                finally:
                    local.stack.pop()
            try:
                with (
                    torch.profiler.profile(
                        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
                    ) as profile,
                    torch.profiler.record_function(name),
                ):
                    result = function(*args, **kwargs)
            finally:
                local.stack.pop()
            self.traced[phase] += 1
            self._read(profile.events() or [], phase)
            return result

        return traced

    def _read(self, events: Any, phase: str) -> None:
        for event in events:
            if not event.name.startswith("aten::"):
                continue
            parent = event.cpu_parent
            while parent is not None and not parent.name.startswith("roofloop:"):
                parent = parent.cpu_parent
            if parent is not None:
                entry = self.found[int(parent.name.split(":")[1]), phase, event.name]
                entry[0] += 1
                entry[1] += event.self_cpu_time_total / 1e6
                entry[2][str([s for s in event.input_shapes if s])] += 1

    def rows(self, sites: list[Site]) -> list[dict[str, Any]]:
        """Torch operators per operator, role and phase, over all traced forwards; the commonest input shapes."""
        merged: dict[tuple[str, str, str, str], list[Any]] = defaultdict(lambda: [0, 0.0, Counter()])
        for (index, phase, name), (calls, seconds, shapes) in self.found.items():
            entry = merged[sites[index].operator, sites[index].role, phase, name]
            entry[0] += calls
            entry[1] += seconds
            entry[2].update(shapes)
        return [
            {
                "operator": operator, "role": role, "phase": phase, "aten": name, "calls": calls, "self_s": seconds,
                "shapes": shapes.most_common(1)[0][0],
            }
            for (operator, role, phase, name), (calls, seconds, shapes) in merged.items()
        ]  # fmt: skip


def phase_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`decode` when every sequence gets one token, else `prefill` (a batch that mixes both among them).

    Sequences packed in one row (continuous batching) say how many tokens the longest brings in `max_length_q` or
    `max_seqlen_q`.
    """
    for key in ("max_length_q", "max_seqlen_q"):
        if kwargs.get(key) is not None:
            longest = kwargs[key]
            return "decode" if max(longest.values() if isinstance(longest, dict) else [longest]) == 1 else "prefill"
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        ids = kwargs.get("inputs_embeds")
    return "decode" if ids is not None and ids.shape[1] == 1 else "prefill"


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    value = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    if not isinstance(value, torch.Tensor):
        value = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
    return value


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    x = _first(args, kwargs)
    return _dtype(x), (x.numel() // max(x.shape[-1], 1), x.shape[-1])


def _rotary(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    q, k = args[0], args[1]
    return _dtype(q), (q.shape[0] * q.shape[2], q.shape[1], k.shape[1], q.shape[3])


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    q, k = args[1], args[2]
    return _dtype(q), (q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], k.shape[2])


def _cache_update(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    k = args[1] if len(args) > 1 else kwargs["key_states"]
    length = result[0].shape[-2] if isinstance(result, tuple) and isinstance(result[0], torch.Tensor) else 0
    return _dtype(k), (k.shape[0], k.shape[1], k.shape[2], k.shape[3], length)


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    return _dtype(result), (result.numel() // max(result.shape[-1], 1), result.shape[-1])


def _sites(model: nn.Module) -> Iterator[Site]:
    """Every operator's place in a Llama-like model, and the functions of transformers that it calls."""
    modules = dict(model.named_modules())
    attention_classes = {}
    for name, module in modules.items():
        kind, last = type(module).__name__, name.rpartition(".")[2]
        path = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if isinstance(module, nn.Linear):
            n, k = module.weight.shape
            role = last.removesuffix("_proj")
            yield Site(module, "forward", "linear", role, path, functools.partial(_linear, n, k))
        elif isinstance(module, nn.Embedding):
            yield Site(module, "forward", "embedding", last, path, _embedding)
        elif kind.endswith("RMSNorm"):
            yield Site(module, "forward", "rmsnorm", last, path, _rows)
        elif kind.endswith("RotaryEmbedding"):
            yield Site(
                module, "forward", "rotary_table", last, path, lambda a, kw, r: (_dtype(r[0]), _rows(r, {}, None)[1])
            )
        elif hasattr(module, "q_proj") and hasattr(module, "k_proj"):
            attention_classes[type(module)] = module
            yield Site(module, "forward", "attention_glue", last, path, _rows)
        elif hasattr(module, "gate_proj") and hasattr(module, "down_proj"):
            width = module.gate_proj.out_features
            yield Site(module, "forward", "mlp", last, path, functools.partial(_wide, width))
        elif hasattr(module, "self_attn"):
            yield Site(module, "forward", "residual_add", "layer", path, _rows)
        elif hasattr(module, "layers"):
            yield Site(module, "forward", "model_glue", "model", path, _ids, outermost=True)
        elif hasattr(module, "lm_head"):
            yield Site(module, "forward", "head_glue", "model", path, _ids, outermost=True)
    for kind_of in attention_classes:
        namespace = sys.modules[kind_of.__module__]
        if hasattr(namespace, "apply_rotary_pos_emb"):
            yield Site(namespace, "apply_rotary_pos_emb", "rotary", "qk", "rotary", _rotary)
        if hasattr(namespace, "eager_attention_forward"):
            yield Site(namespace, "eager_attention_forward", "attention", "core", "attention", _attention)
    if attention_classes:
        yield from _library_sites()


def _library_sites() -> Iterator[Site]:
    """Transformers' attention functions and caches, as far as this version has them."""
    interfaces = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    for name in [name for name in interfaces if "sdpa" in name or "eager" in name]:
        # what an overlay has put in front of the library's own
        mapping = interfaces._local_mapping if name in interfaces._local_mapping else interfaces._global_mapping
        yield Site(_Entries(mapping), name, "attention", "core", "attention", _attention)
    cache = importlib.import_module("transformers.cache_utils").Cache
    yield Site(cache, "update", "cache_update", "kv", "cache", _cache_update)


class _Entries:
    """Entries of a mapping as attributes, so that they are replaced like everything else."""

    def __init__(self, mapping: dict[str, Any]) -> None:
        self.__dict__ = mapping


def _linear(n: int, k: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    x = _first(args, kwargs)
    return _dtype(x), (x.numel() // k, n, k)


def _wide(width: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    dtype, axes = _rows(args, kwargs, result)
    return dtype, (*axes, width)


def _table(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    return _rows(result, {}, None)


def _ids(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, Axes]:
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        ids = kwargs["inputs_embeds"][..., 0]
    output = result[0] if isinstance(result, tuple) else next(v for v in result.values() if isinstance(v, torch.Tensor))
    return _dtype(output), (ids.numel(), output.shape[-1])


def _sizes(model: nn.Module) -> dict[str, int | float | str]:
    config: Any = model.config
    parameters = list({p.data_ptr(): p for p in model.parameters()}.values())
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "dtype": _dtype(parameters[0]),
        "eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "weight_bytes": sum(p.numel() * p.element_size() for p in parameters),
    }
