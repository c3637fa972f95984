"""The laboratory of one run: what every stage needs to bring an engine up and measure it."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from kb.records import Provenance
from kernels.ruler.inputs import layout
from kernels.ruler.lease import device_lease, host_leases
from kernels.ruler.spec import Problem
from profiles import accuracy, machine, traffic
from profiles.accuracy import Distance
from profiles.engines import open_engine
from profiles.engines.base import Engine, EngineFailure, GenerateRequest, Resolved, Settings, Stack
from profiles.models import load_tokenizer
from profiles.operators import Profile
from profiles.prompts import PromptSource
from profiles.records import Record
from profiles.reference import Reference
from profiles.rounds import Measurement, pool
from profiles.target import Target
from profiles.traffic import metric_of
from profiles.workload import Workload
from tasks.profile import profile_engine
from tasks.run_state import RunState
from tasks.search import Gate, Measured
from tasks.workspace import Workspace

P = ParamSpec("P")
T = TypeVar("T")

WARM_UP_TOKENS = 32
SCORED_REQUESTS = 8
"""Timed requests that the reference scores for one point of the settings search."""


class PointFigures(Record):
    """What measuring one stack by itself gave, and what it cost to find out."""

    resolved: Resolved
    measurement: Measurement
    row: dict[str, float | int | bool | None]
    """The normalised row over all kept rounds."""
    rounds: int
    """Kept rounds behind the row."""
    distance: Distance
    start_s: float
    round_s: float
    accuracy_s: float

    @property
    def most_pairs(self) -> int:
        """Pairs of rounds that a comparison on this traffic may take: 6, and up to 16 where rounds are short."""
        return min(16, max(6, int(10.0 / self.round_s) // 2 * 2))


@dataclass(frozen=True)
class Lab:
    """Where and with what this run measures."""

    workspace: Workspace
    run: RunState
    model_dir: Path
    target: Target

    @property
    def workload(self) -> Workload:
        """The workload of the run."""
        return self.run.record.workload

    @cached_property
    def source(self) -> PromptSource:
        """Prompts for the model's tokenizer."""
        return PromptSource(load_tokenizer(self.model_dir))

    @contextlib.contextmanager
    def reference(self) -> Iterator[Reference]:
        """The clean fp32 reference in a process of its own."""
        log = self.run.folder / "engines" / "reference.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with Reference(self.model_dir, children=self.workspace.children, log=log) as reference:
            yield reference

    def open(self, stack: Stack, name: str) -> Engine:
        """An engine for the stack, not yet started; its output goes to `engines/<name>.log`."""
        log = self.run.folder / "engines" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return open_engine(
            self.workload,
            self.model_dir,
            with_fixed_knobs(stack, self.workload),
            children=self.workspace.children,
            builds=self.workspace.builds,
            log=log,
        )

    def cache_state(self, problem: Problem) -> Literal["warm", "cold"]:
        """`cold` for a problem that reads mostly weights or keys and values, where the weights exceed the caches.

        All weights pass between two uses of one of them, or of a layer's keys and values. What is left, activations,
        was written a moment before in the model too.
        """
        weights = sum(file.stat().st_size for file in self.model_dir.glob("*.safetensors"))
        held = max(machine.caches(machine.usable_cpus()).values(), default=0)
        one = layout(problem, problem.visible[0], 1)
        stays = sum(
            place.bytes
            for tensor, place in zip(problem.inputs, one.inputs, strict=True)
            if place and (tensor.constant or tensor.resident)
        )
        return "cold" if weights > held and 2 * stays > one.input_bytes else "warm"

    def provenance(self, engine: str) -> Provenance:
        """Under which versions this run measures."""
        versions = self.run.record.versions
        return Provenance(
            roofloop=versions.get("roofloop", ""),
            ruler=versions.get("ruler", ""),
            engine=engine,
            target=self.run.record.fingerprint,
            target_family=self.target.kind,
            workload=self.run.record.workload_hash,
        )

    def alone(self, work: Callable[P, T]) -> Callable[P, T]:
        """`work` with the device to itself: the ruler of any workspace on this host waits, and we wait for it."""

        def held(*args: P.args, **options: P.kwargs) -> T:
            with device_lease(host_leases(), "cpu"):
                return work(*args, **options)

        return held

    def measure(
        self,
        stack: Stack,
        name: str,
        reference: Reference,
        seed: int,
        *,
        hopeless: Callable[[float], bool] | None = None,
        distance: Distance | None = None,
    ) -> PointFigures:
        """Bring the stack up, serve rounds of visible prompts, score what was emitted.

        Args:
            stack: what to measure.
            name: of the engine's log and of the raw file.
            reference: started.
            seed: decides the prompts.
            hopeless: whether the first round's figure is too far from the best to go on; such a point's accuracy is not
                looked at either.
            distance: from the reference, where it is known; then it is not measured.

        Raises:
            EngineFailure: the engine or the reference failed, or a request did.
        """
        return self.alone(self._measure)(stack, name, reference, seed, hopeless, distance)

    def _measure(  # noqa: PLR0917
        self,
        stack: Stack,
        name: str,
        reference: Reference,
        seed: int,
        hopeless: Callable[[float], bool] | None,
        distance: Distance | None,
    ) -> PointFigures:
        engine = self.open(stack, name)
        began = time.monotonic()
        try:
            resolved = engine.start()
            started = time.monotonic()
            found = traffic.measure(
                engine,
                self.workload.traffic,
                self.source,
                metric=self.workload.objective,
                max_rounds=3,
                seed=seed,
                gates=self.workload.gates,
                # What is compiled on the way is compiled for lengths that a short warm-up would not reach.
                warm_up_tokens=None if stack.settings.knobs.get("torch_compile") else WARM_UP_TOKENS,
                hopeless=hopeless,
            )
            if found.value is None:
                raise EngineFailure("refused", found.note)
            served = time.monotonic()
            if distance is None:
                distance = Distance(sample=accuracy.Sample())
                if not found.pruned:
                    distance = self._distance(engine, found, reference)
            raw = self.run.folder / "raw" / f"{name}.json"
            traffic.write_raw(raw, found.rounds, {"purpose": name, "stack": stack.id})
        finally:
            engine.stop()
        pooled = pool(found.rounds, self.workload.gates)
        return PointFigures(
            resolved=resolved,
            measurement=found.model_copy(update={"rounds": ()}),  # they lie in the raw file, untouched
            row={column: metric_of(pooled, column) for column in traffic.COLUMNS},
            rounds=len(found.rounds),
            distance=distance,
            start_s=started - began,
            round_s=statistics.median(one.summary.duration_s for one in found.rounds),
            accuracy_s=time.monotonic() - served,
        )

    def _distance(self, engine: Engine, found: Measurement, reference: Reference) -> Distance:
        if not self.workload.gates.accuracy.enabled:
            return Distance(sample=accuracy.Sample())
        kept = found.rounds[0]
        prompts = traffic.draw_prompts(self.source, self.workload.traffic, kept.seed)
        items = [(f"{kept.seed}.{row.index}", prompts[row.index], row.tokens) for row in kept.rows[:SCORED_REQUESTS]]
        return Distance(
            sample=accuracy.sample(reference, items),
            witness=accuracy.witness(reference, engine, self.source, self.workload.traffic),
        )

    def profile(self, stack: Stack, name: str) -> tuple[Profile, int]:
        """Where the stack's time goes on the workload's traffic, and the threads that it runs on."""
        engine = self.open(stack, name)
        shape = self.workload.traffic
        prompts = self.source.visible(self.run.seed("profile"), shape.concurrency, shape.input_tokens)
        requests = [
            GenerateRequest(id=f"profile-{i}", prompt=tuple(prompt), max_tokens=shape.output_tokens)
            for i, prompt in enumerate(prompts)
        ]
        try:
            threads = threads_of(engine.start())
            raw = self.run.folder / "raw" / f"{name}.json"
            raw.parent.mkdir(parents=True, exist_ok=True)
            return self.alone(profile_engine)(engine, requests, raw, self.target, threads), threads
        finally:
            engine.stop()


def with_fixed_knobs(stack: Stack, workload: Workload) -> Stack:
    """The stack with the knobs that the workload holds; stock (no knobs, no kernels) is measured without them."""
    if not stack.settings.knobs and not stack.kernels:
        return stack
    knobs = {**stack.settings.knobs, **workload.engine.knobs}
    return replace(stack, settings=Settings(engine=stack.settings.engine, knobs=knobs))


def threads_of(resolved: Resolved) -> int:
    """OpenMP threads of one engine process."""
    return max(1, int(resolved.config.get("threads") or 1))


def stock(workload: Workload) -> Stack:
    """The engine as it comes."""
    return Stack(Settings(engine=workload.engine.name))


def measured(workload: Workload, figures: PointFigures, stock_distance: Distance) -> Measured:
    """A settings point as the search sees it: the objective, and every gate of the workload."""
    value = figures.measurement.value
    assert value is not None  # `Lab.measure` raises otherwise
    return Measured(
        resolved_hash=figures.resolved.hash,
        resolved=figures.resolved.config,
        value=value,
        gates=gates_of(workload, figures, stock_distance),
        pruned=figures.measurement.pruned,
    )


def gates_of(workload: Workload, figures: PointFigures, stock_distance: Distance) -> dict[str, Gate]:
    """Each gate with what it came to; a gate that could not be evaluated is not passed."""
    limits = workload.gates
    memory = figures.row.get("peak_memory_bytes")
    rows: Sequence[tuple[str, float | None, Any]] = (
        ("ttft_p95_ms", limits.ttft_p95_ms, figures.row.get("ttft_ms_p95")),
        ("tpot_p95_ms", limits.tpot_p95_ms, figures.row.get("tpot_ms_p95")),
        ("peak_memory_gib", limits.peak_memory_gib, None if memory is None else memory / 2**30),
    )
    gates = {}
    for name, limit, value in rows:
        if limit is None:
            continue
        ok = None if value is None else value <= limit
        reason = "" if ok else f"{name} is {value:.3g}, over {limit:.3g}" if value is not None else f"{name} is unknown"
        gates[name] = Gate(value, limit, ok, reason)
    if limits.accuracy.enabled and not figures.measurement.pruned:
        verdict = accuracy.judge(limits.accuracy, figures.distance, stock_distance)
        ok = {"pass": True, "fail": False}.get(verdict.status)
        gates["accuracy"] = Gate(None, None, ok, "" if ok else verdict.reason)
    return gates


def fresh_seed() -> int:
    """A seed for a person who gave none."""
    return secrets.randbelow(2**31)
