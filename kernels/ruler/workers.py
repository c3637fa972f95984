"""The processes and the memory of one verdict: candidate, baseline (twice when confirming), one that calls nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels.ruler import build as building
from kernels.ruler import handle, inputs, sandbox, worker
from kernels.ruler.spec import Candidate, Problem, Shape
from kernels.ruler.timing import CACHE_BYTES

EAGER, VENDOR, COMPILED, LIBRARY = 0, 1, 2, 3
NAMES = {EAGER: "eager", VENDOR: "vendor", COMPILED: "compile", LIBRARY: "onednn"}
OPTIONAL = (COMPILED, LIBRARY)
"""Baselines that are left out where they fail."""
# The switch's name says bf16, and where the hardware has no faster way oneDNN computes in float32 all the same, at
# times twice as fast as the library that eager takes. Where its results are good enough, that is no candidate's merit.
ONEDNN = """

import torch as _torch

_plain = run


def run(*inputs):
    switch = _torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        return _plain(*inputs)
    finally:
        switch.fp32_precision = before
"""
ARENA_BYTES, MOST_SLOTS, PACK_FACTOR = 144 << 20, 4096, 8
"""Most bytes of a batch: a kernel that reads 1.6 MB in 30 µs needs some ninety calls beside the cost of a handshake."""
LOAD_S, FIRST_S, CALL_S, COMPILE_S = 60.0, 10.0, 5.0, 120.0


@dataclass(frozen=True)
class Terms:
    """The conditions of one judgement."""

    problem: Problem
    candidate: Candidate
    built: building.Built
    baseline: Candidate | None
    builds: Path
    threads: int
    confinement: str
    secret: bytes
    confirm: bool
    cold: bool
    alpha: float
    threshold: float
    compiled: bool
    """Whether torch.compile of the reference is to be tried as a baseline."""
    device: str = "cpu"
    """Where both sides compute: `cpu`, `cuda:0` (ROCm's devices have that name too)."""
    thorough: bool = True
    """Without, a screen checks the first visible shape and one hidden case: enough to choose what is confirmed."""


class Workers:
    """Starts, loads, lays out and ends the workers of one verdict."""

    def __init__(self, terms: Terms, template: handle.Template) -> None:
        self.terms, self.problem, self.template = terms, terms.problem, template
        self.draws = 0
        self.prepared: dict[str, float] = {}
        self.confinement: dict[str, Any] = {}
        self.workers: list[handle.Worker] = []
        self.chosen: set[int] = set()
        """Baselines that were the fastest somewhere: fresh workers need no other."""
        self.hidden = inputs.hidden_shapes(self.problem, self._rng())
        self.sets = self._weight_sets()
        shapes = (*self.problem.visible, *self.hidden)
        plans = [self._plan(shape, self._most_slots(shape), padded=True) for shape in shapes]
        self.output_bytes = max(plan.output_bytes for plan in plans) + 4096
        self.memory = inputs.allocate(
            max(plan.input_bytes for plan in plans) + 4096, sealed=True, device=terms.device
        )  # fmt: skip
        try:
            self._find_files()
            self.open()
        except BaseException:
            self.close()
            raise

    def _find_files(self) -> None:
        """Build what stands beside the candidate, and say what the workers may see and use."""
        terms = self.terms
        self.loops: dict[bool, Path] = {}
        for what in (terms.candidate, terms.baseline):
            if what is not None and what.language == "cpp":
                source, names = building.loop_source(self.problem, what.prepares), ["serve", "noop"]
                self.loops[what.prepares] = building.compile_library(source, names, terms.builds, trusted=True).path
        own = terms.baseline
        self.beside = None if own is None else building.build(own, self.problem, terms.builds)
        files = [terms.built.path, *self.loops.values(), *([self.beside.path] if self.beside else [])]
        self.policy = sandbox.Policy(
            read=(*handle.visible_paths(), *map(str, files)), fork=False, cpus=tuple(handle.cores(terms.threads)),
            level="full" if terms.confinement == "best" else terms.confinement, pids=64 + 4 * (os.cpu_count() or 1),
            # A driver maps gigabytes for itself.
            memory_bytes=(2 << 30) + 8 * (self.memory.size + self.output_bytes) + (terms.device != "cpu") * (32 << 30),
            tmp_bytes=32 << 20,
        )  # fmt: skip

    def open(self) -> None:
        """Start fresh workers (ending the old ones), confine them, load both sides."""
        terms = self.terms
        while self.workers:
            self.workers.pop().close()
        trusted, extra = self.policy, {}
        if terms.compiled:  # the compiler runs in the baseline's worker, and keeps what it made
            cache = terms.builds / "inductor"
            cache.mkdir(parents=True, exist_ok=True)
            trusted = replace(
                self.policy, fork=True, write=(str(cache),), memory_bytes=self.policy.memory_bytes + (4 << 30)
            )
            extra = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        interpreted = terms.candidate.language == "triton" and terms.device == "cpu"
        self.base = self._worker(trusted, extra)
        self.cand = self._worker(self.policy, {"TRITON_INTERPRET": "1"} if interpreted else {})
        self.twin = self._worker(trusted, extra) if terms.confirm else None
        self.sides = list(self.workers)
        # Runs that call nothing, to know what the ruler itself costs: in workers of their own, so that what is compared
        # has loaded nothing beside what is timed.
        self.idle = {False: self._worker(self.policy, {})}
        self.idle[False].send(worker.LOAD, {"which": 0, "language": "null"}, LOAD_S)
        if self.loops:
            self.idle[True] = self._worker(self.policy, {})
            shim = next(iter(self.loops.values()))
            body = {"which": 0, "language": "cpp", "path": "", "entry": "noop", "prepares": False, "shim": str(shim)}
            self.idle[True].send(worker.LOAD, body, LOAD_S)
        level = sandbox.level_reached(self.policy, self.cand.lacking)
        self.confinement = {"level": level, "lacking": self.cand.lacking, "inputs_sealed": self.memory.sealed}
        wanted = terms.confinement
        if wanted != "best" and sandbox.LEVELS.index(level) < sandbox.LEVELS.index(wanted):
            lacking = ", ".join(self.cand.lacking)
            reason = f"confinement {wanted} was asked for, {level} is to be had; lacking: {lacking}"
            raise handle.WorkerFailed("void", reason, "confinement")
        for side in (self.base, self.twin):
            if side is not None:
                self._load_baselines(side)
        self._load(self.cand, terms.candidate, terms.built.path)

    def _worker(self, policy: sandbox.Policy, extra: dict[str, str]) -> handle.Worker:
        made = handle.Worker(self.template, self.memory, self.output_bytes, policy, extra, self.terms.device)
        self.workers.append(made)
        return made

    def _load(self, side: handle.Worker, what: Candidate, path: Path) -> None:
        body = {
            "which": 0, "language": what.language, "path": str(path), "entry": what.entry, "prepares": what.prepares,
            "shim": str(self.loops.get(what.prepares)), "operator": self.problem.operator, "compile": False,
        }  # fmt: skip
        try:
            side.send(worker.LOAD, body, LOAD_S)
        except handle.WorkerFailed as error:
            text = f"loading: {error.reason}. {side.said()}".strip()
            raise handle.WorkerFailed(error.status, text, error.law) from error

    def _load_baselines(self, side: handle.Worker) -> None:
        own = self.terms.baseline
        if own is not None and self.beside is not None:
            self._load(side, own, self.beside.path)
            self.baselines = {EAGER: "candidate"}
        else:
            sources = {EAGER: self.problem.reference, VENDOR: self.problem.vendor}
            if self.terms.compiled:
                sources[COMPILED] = self.problem.reference
            if self.problem.reduction_axes and any(t.dtype == "float32" and t.shape for t in self.problem.inputs):
                sources[LIBRARY] = self.problem.reference + ONEDNN
            used = self.chosen or set(sources)
            self.baselines = {which: NAMES[which] for which, source in sources.items() if source and which in used}
            python = {"language": "torch", "path": "", "entry": "run", "prepares": False}
            for which in self.baselines:
                body = {**python, "which": which, "source": sources[which], "compile": which == COMPILED}
                side.send(worker.LOAD, body, COMPILE_S if which == COMPILED else LOAD_S)

    def _plan(self, shape: Shape, slots: int, **how: Any) -> inputs.Layout:
        return inputs.layout(self.problem, shape, slots, sets=min(self.sets, slots), **how)

    def _weight_sets(self) -> int:
        """Copies of the constants: one when the caches are warm, else more than the caches hold (at most 160)."""
        one = inputs.layout(self.problem, self.problem.visible[0], 1)
        size = self._constant_bytes(one)
        return min(160, -(-CACHE_BYTES // size)) if self.terms.cold and size else 1

    def _constant_bytes(self, plan: inputs.Layout) -> int:
        pairs = zip(self.problem.inputs, plan.inputs, strict=True)
        return sum(place.bytes for tensor, place in pairs if tensor.constant and place is not None)

    def _most_slots(self, shape: Shape) -> int:
        one = inputs.layout(self.problem, shape, 1)
        constant = self._constant_bytes(one)
        total = one.input_bytes + one.output_bytes
        most = min(MOST_SLOTS, ARENA_BYTES // max(total - constant, 1))
        return max(2, min(most, self.sets) if self.sets > 1 else most)

    def _configure(self, plan: inputs.Layout, scalars: list[Any], others: int = 0) -> None:
        """Lay out a shape for the candidate and, for `others` slots, for the other workers."""
        body = handle.configuration(self.problem, plan, scalars)
        for side in self.workers if others else (self.cand,):
            side.send(worker.CONFIGURE, body if side is self.cand else {**body, "slots": others}, CALL_S)

    def _prepare(self, plan: inputs.Layout, scalars: list[Any], *, all_sides: bool) -> None:
        """Let both sides pack the constants that now lie in memory: untimed, recorded."""
        raw = self._constant_bytes(plan)
        body = handle.configuration(self.problem, plan, scalars)
        body |= {"which": 0, "most_packed_bytes": PACK_FACTOR * raw + (1 << 20)}
        if self.terms.candidate.prepares:
            seconds = self.cand.send(worker.PREPARE, body, FIRST_S + CALL_S * plan.sets)
            self.prepared = {"seconds": seconds / max(plan.sets, 1), "constant_bytes": float(raw)}
        if all_sides and self.terms.baseline is not None and self.terms.baseline.prepares:
            for side in self.workers:
                if side is not self.cand:
                    side.send(worker.PREPARE, body, FIRST_S + CALL_S * plan.sets)

    def _fill(self, plan: inputs.Layout, **how: Any) -> inputs.Views:
        return inputs.fill(self.problem, plan, self.memory, self._rng(), **how)

    def _rng(self) -> np.random.Generator:
        self.draws += 1
        return inputs.generator(self.terms.secret, self.draws)

    def _cost(self, plan: inputs.Layout, native: bool, calls: int) -> float:
        """Seconds of a handshake in which nothing is called, with the caches as they are for the others.

        With `calls` of a Python function that hands out ready results: these are then copied as any others.
        """
        side = self.idle[native and True in self.idle]
        inputs.poison(side.outputs, plan, self._rng())
        self.memory.bytes[: plan.input_bytes].max()
        return side.run(0, 0, calls, CALL_S + CALL_S * calls)

    def _native_baseline(self) -> bool:
        return self.terms.baseline is not None and self.terms.baseline.language == "cpp"

    def close(self) -> None:
        """End the workers and give all memory back."""
        while self.workers:
            self.workers.pop().close()
        self.memory.close()
