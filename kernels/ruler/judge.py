"""The judge: one candidate against the best baseline, checked at every timed call."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.errors import InputError
from kernels.ruler import build as building
from kernels.ruler import compare, handle, inputs, sandbox, stats, worker
from kernels.ruler.floor import Ceilings, floor_s
from kernels.ruler.spec import DTYPES, Candidate, Problem, Shape
from kernels.ruler.verdict import Interval, Mode, ShapeResult, Verdict

EAGER, VENDOR, COMPILED, NULL, NULL_NATIVE = 0, 1, 2, 8, 9
NAMES = {EAGER: "eager", VENDOR: "vendor", COMPILED: "compile"}
MOST_OVERHEAD = 0.05
ARENA_BYTES = 48 << 20
MOST_SLOTS = 1024
CACHE_BYTES = 96 << 20
LOAD_S, FIRST_S, CALL_S = 60.0, 30.0, 10.0
_templates: dict[int, handle.Template] = {}


def judge(
    problem: Problem, candidate: Candidate, *, mode: Mode, ceilings: Ceilings | None, threads: int, builds: Path,
    budget_s: float, seed: bytes | None = None, confinement: str = "best", baseline: Candidate | None = None,
    cache_state: str = "warm", alpha: float = 0.05,
) -> Verdict:  # fmt: skip
    """Judge a candidate.

    Args:
        problem: what is to be computed; see `kernels.ruler.spec`.
        candidate: the source that claims to do so.
        mode: `screen` (the first visible shape, few pairs) or `confirm` (all visible shapes, all regimes, many pairs).
        ceilings: of this machine, for the floor; None: no floor is enforced, and the verdict says so.
        threads: cores that either side may use.
        builds: folder of built artefacts.
        budget_s: seconds after which measuring stops with what there is.
        seed: secret for inputs; drawn when None. Give one only to reproduce.
        confinement: `best`, or the level that must be reached: `process`, `sandbox`, `full` (or `none`).
        baseline: what to compare with instead of the best of eager, vendor's fused operator and torch.compile.
        cache_state: `warm` or `cold`: the same for both sides.
        alpha: level of the interval; see `stats.alpha_of_try` for a campaign's confirmations.

    Raises:
        InputError: the problem itself is unfit, or the machine lacks what judging needs.
    """
    began = time.monotonic()
    _check_arguments(problem, mode, confinement, cache_state, threads)
    secret = seed if seed is not None else secrets.token_bytes(32)
    frame: dict[str, Any] = {
        "mode": mode, "problem": problem.name, "problem_id": problem.id, "candidate_id": candidate.id,
        "versions": versions(),
    }  # fmt: skip
    session: _Session | None = None
    try:
        built = building.build(candidate, problem, builds)
        session = _Session(problem, candidate, built, baseline, builds, threads, confinement, secret, mode)
        frame |= session.judge(ceilings, budget_s - (time.monotonic() - began), cache_state, alpha)
    except building.BuildFailed as error:
        frame |= {"status": "build_failed", "reason": error.message}
    except building.NoCompiler as error:
        raise InputError("C++ candidates need a compiler.", remedy=str(error)) from error
    except handle.WorkerFailed as error:
        frame |= {"status": error.status, "reason": error.reason, "law": error.law}
        if session is not None:
            frame |= session.account()
    finally:
        if session is not None:
            session.close()
    return Verdict(**frame, duration_s=time.monotonic() - began)


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions that a verdict depends on; `ruler` is the hash of the ruler's own files."""
    own = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        own.update(path.read_bytes())
    try:
        compiler = building.compiler()[1]
    except building.NoCompiler:
        compiler = "none"
    return {
        "ruler": own.hexdigest()[:16], "torch": torch.__version__, "numpy": np.__version__, "compiler": compiler,
        "python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine(),
    }  # fmt: skip


def template(threads: int) -> handle.Template:
    """The running template process for a thread count, started when there is none."""
    found = _templates.get(threads)
    if found is None or found.process.poll() is not None:
        found = _templates[threads] = handle.Template(threads)
    return found


def close_templates() -> None:
    """End all template processes (they also end by themselves when this process does)."""
    while _templates:
        _templates.popitem()[1].close()


def _check_arguments(problem: Problem, mode: str, confinement: str, cache_state: str, threads: int) -> None:
    def refuse(key: str, problem_text: str, remedy: str) -> None:
        raise InputError(problem_text, remedy=remedy, file=problem.name, key=key)

    if mode not in ("screen", "confirm"):
        refuse("mode", f"{mode!r} is not a mode.", "Use screen or confirm.")
    if confinement not in ("best", *sandbox.LEVELS):
        refuse("confinement", f"{confinement!r} is not a level.", f"Use best, {', '.join(sandbox.LEVELS)}.")
    if cache_state not in ("warm", "cold"):
        refuse("cache_state", f"{cache_state!r} is not a cache state.", "Use warm or cold.")
    if not 1 <= threads <= (os.cpu_count() or 1):
        refuse("threads", f"{threads} threads do not fit this machine.", f"Use 1 to {os.cpu_count()}.")
    if not problem.visible or not problem.outputs:
        refuse("visible", "The problem has no shape or no output.", "Give at least one of each.")
    if not problem.reference.strip():
        refuse("reference", "The problem has no reference.", "Give Python source that defines run(*inputs).")
    for tensor in (*problem.inputs, *problem.outputs):
        if tensor.dtype not in DTYPES:
            refuse(tensor.name, f"{tensor.dtype!r} is not a dtype.", f"Use one of {', '.join(DTYPES)}.")
    for regime in problem.regimes:
        if regime not in inputs.REGIMES:
            refuse("regimes", f"{regime!r} is not a regime.", f"Use some of {', '.join(inputs.REGIMES)}.")


@dataclass
class _Timed:
    """What was measured at one shape."""

    shape: dict[str, int]
    slots: int
    baseline: str
    baseline_s: list[float] = field(default_factory=list)
    candidate_s: list[float] = field(default_factory=list)
    null_s: list[float] = field(default_factory=list)
    delayed: int = 0
    raw: dict[str, list[float]] = field(default_factory=dict)


class _Session:
    """One candidate's worker and its baseline's, for the time of one verdict."""

    def __init__(
        self, problem: Problem, candidate: Candidate, built: building.Built, baseline: Candidate | None, builds: Path,
        threads: int, confinement: str, secret: bytes, mode: Mode,
    ) -> None:  # fmt: skip
        self.problem, self.candidate, self.mode, self.secret = problem, candidate, mode, secret
        self.reference = compare.load_reference(problem.reference)
        self.native = candidate.language == "cpp"
        self.draws = 0
        self.cases = {
            "visible": 0,
            "visible_failed": 0,
            "hidden": 0,
            "hidden_failed": 0,
            "worst_error_over_budget": 0.0,
        }
        self.hidden_seen = False
        self.first_error: dict[str, Any] | None = None
        self.prepared: dict[str, float] = {}
        self.workers: list[handle.Worker] = []
        self.sets = 1
        self.inputs: inputs.Memory | None = None
        self.hidden = inputs.hidden_shapes(problem, self._rng())
        sizes = [inputs.layout(problem, s, self._most_slots(s), padded=True) for s in (*problem.visible, *self.hidden)]
        output_bytes = max(plan.output_bytes for plan in sizes) + 4096
        self.inputs = inputs.Memory(max(plan.input_bytes for plan in sizes) + 4096, sealed=True)
        level = "full" if confinement == "best" else confinement
        libraries = [str(built.path)]
        shims = {}
        for side in (candidate, baseline):
            if side is not None and side.language == "cpp":
                shims[side.prepares] = building.compile_library(
                    loop_source(problem, side.prepares), ["loop", "noop"], builds, trusted=True
                ).path
        libraries += [str(path) for path in shims.values()]
        beside = None if baseline is None else building.build(baseline, problem, builds)
        if beside is not None:
            libraries.append(str(beside.path))
        bytes_used = self.inputs.size + output_bytes
        cores = tuple(sorted(os.sched_getaffinity(0)))[-threads:] if hasattr(os, "sched_getaffinity") else ()
        policy = sandbox.Policy(
            read=(*handle.visible_paths(), *libraries), fork=False, level=level, cpus=cores, pids=64 + 4 * threads,
            memory_bytes=(2 << 30) + 6 * bytes_used, tmp_bytes=32 << 20,
        )  # fmt: skip
        extra = {"TRITON_INTERPRET": "1"} if candidate.language == "triton" and not torch.cuda.is_available() else {}
        ours = template(threads)
        try:
            self.base = handle.Worker(ours, self.inputs, output_bytes, policy, {})
            self.workers.append(self.base)
            self.cand = handle.Worker(ours, self.inputs, output_bytes, policy, extra)
            self.workers.append(self.cand)
        except BaseException:
            self.close()
            raise
        self.confinement = {
            "level": sandbox.level_reached(policy, self.cand.lacking), "lacking": self.cand.lacking,
            "sealed": self.inputs.sealed,
        }  # fmt: skip
        if confinement not in ("best", "none") and sandbox.LEVELS.index(
            str(self.confinement["level"])
        ) < sandbox.LEVELS.index(confinement):
            lacking = ", ".join(self.cand.lacking)
            raise handle.WorkerFailed("void", f"confinement {confinement} cannot be reached: {lacking}", "confinement")
        self.baselines: dict[int, str] = {}
        self._load_baselines(baseline, beside, shims)
        self._load(self.cand, 0, candidate, built.path, shims.get(candidate.prepares))

    # --- loading ---------------------------------------------------------------------------------------------------

    def _load(self, side: handle.Worker, which: int, what: Candidate, path: Path, shim: Path | None) -> None:
        body = {
            "which": which, "language": what.language, "path": str(path), "entry": what.entry,
            "prepares": what.prepares, "operator": self.problem.operator, "compile": False, "shim": str(shim),
        }  # fmt: skip
        try:
            side.send(worker.LOAD, body, LOAD_S)
        except handle.WorkerFailed as error:
            raise handle.WorkerFailed(
                error.status, f"{error.reason}: {side.said()}".strip(": \n"), error.law
            ) from error

    def _load_baselines(
        self, baseline: Candidate | None, beside: building.Built | None, shims: dict[bool, Path]
    ) -> None:
        python = {"language": "torch", "path": "", "entry": "run", "prepares": False, "compile": False}
        if baseline is not None and beside is not None:
            self._load(self.base, EAGER, baseline, beside.path, shims.get(baseline.prepares))
            self.baselines[EAGER] = "candidate"
        else:
            self.base.send(worker.LOAD, {**python, "which": EAGER, "source": self.problem.reference}, LOAD_S)
            self.baselines[EAGER] = "eager"
            if self.problem.vendor:
                self.base.send(worker.LOAD, {**python, "which": VENDOR, "source": self.problem.vendor}, LOAD_S)
                self.baselines[VENDOR] = "vendor"
        self.base.send(worker.LOAD, {"which": NULL, "language": "null"}, LOAD_S)
        self.null_of_baseline = NULL
        native = {"language": "cpp", "path": "", "entry": "noop", "prepares": False, "which": NULL_NATIVE}
        if shims:
            self.base.send(worker.LOAD, {**native, "shim": str(next(iter(shims.values())))}, LOAD_S)
        if baseline is not None and baseline.language == "cpp":
            self.null_of_baseline = NULL_NATIVE
        self.baseline_prepares = baseline is not None and baseline.prepares

    def _configure(self, shape: Shape, slots: int, *, scalars: list[Any], shift: int = 0, padded: bool = False,
                   both: bool = False) -> inputs.Layout:  # fmt: skip
        plan = inputs.layout(self.problem, shape, slots, sets=min(self.sets, slots), shift=shift, padded=padded)
        body = handle.configuration(self.problem, plan, scalars)
        for side in (self.cand, self.base) if both else (self.cand,):
            side.send(worker.CONFIGURE, body, CALL_S)
        return plan

    def _prepare(self, plan: inputs.Layout, scalars: list[Any], *, both: bool = False) -> None:
        """Let the candidate pack the constants that now lie in memory: untimed, recorded."""
        body = handle.configuration(self.problem, plan, scalars) | {
            "which": 0,
            "most_packed_bytes": 8 * self._constant_bytes(plan) + (1 << 20),
        }
        if self.candidate.prepares:
            seconds = self.cand.send(worker.PREPARE, body, FIRST_S)
            self.prepared = {"seconds": seconds / max(plan.sets, 1), "constant_bytes": self._constant_bytes(plan)}
        if both and self.baseline_prepares:
            self.base.send(worker.PREPARE, body, FIRST_S)

    def _constant_bytes(self, plan: inputs.Layout) -> int:
        return sum(
            math.prod(place.shape) * inputs.SIZES[place.dtype]
            for tensor, place in zip(self.problem.inputs, plan.inputs, strict=True)
            if tensor.constant and place is not None
        )

    def _most_slots(self, shape: Shape) -> int:
        one = inputs.layout(self.problem, shape, 1)
        each = one.input_bytes + one.output_bytes - self._constant_bytes(one)
        total = one.input_bytes + one.output_bytes
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 62
        if 30 * total > available:
            raise InputError(
                f"Shape {dict(shape)} needs about {30 * total / 2**30:.1f} GiB to be judged, "
                f"{available / 2**30:.1f} GiB are free.",
                remedy="Use a smaller shape.", file=self.problem.name, key="visible",
            )  # fmt: skip
        return max(2, min(MOST_SLOTS, ARENA_BYTES // max(each, 1)))

    def _rng(self) -> np.random.Generator:
        self.draws += 1
        return inputs.generator(self.secret, self.draws)

    # --- checking --------------------------------------------------------------------------------------------------

    def _arguments(
        self, plan: inputs.Layout, views: list[torch.Tensor | None], scalars: list[Any], slot: int
    ) -> list[Any]:
        return [
            scalar if view is None else view[slot % plan.sets if tensor.constant else slot]
            for tensor, view, scalar in zip(self.problem.inputs, views, scalars, strict=True)
        ]

    def _check_slot(self, plan: inputs.Layout, views: list[torch.Tensor | None], scalars: list[Any], slot: int
                    ) -> tuple[dict[str, Any] | None, list[compare.Expected]]:  # fmt: skip
        """Compare the candidate's outputs of one slot with full expectations; returns (first error, expectations)."""
        terms = compare.summed(self.problem, dict(plan.axes))
        arguments = self._arguments(plan, views, scalars, slot)
        expected = compare.expect(self.problem, self.reference, arguments, terms, int(self._rng().integers(1 << 31)))
        for place, tensor, what in zip(plan.outputs, self.problem.outputs, expected, strict=True):
            got = inputs.batch_view(self.cand.outputs, place, plan.slots)[slot]
            if what.truth.shape != got.shape:
                raise InputError(
                    f"The reference gives shape {tuple(what.truth.shape)}, the problem says {tuple(got.shape)}.",
                    remedy="Make outputs and reference agree.", file=self.problem.name, key=tensor.name,
                )  # fmt: skip
            figure, error = compare.error_of(got, what)
            if math.isfinite(figure):
                self.cases["worst_error_over_budget"] = max(self.cases["worst_error_over_budget"], figure)
            if error is not None:
                return {"output": tensor.name, **error}, expected
        return None, expected

    def _check_case(self, shape: Shape, *, regime: str, hidden: bool, shift: int, padded: bool, rounds: int) -> None:
        """One correctness case: fresh values, a call, every element compared; then the same with small changes."""
        kind = "hidden" if hidden else "visible"
        self.cases[kind] += 1
        self.hidden_seen |= hidden
        scalars = inputs.scalars(self.problem, self._rng() if hidden else None)
        try:
            plan = self._configure(shape, 1, scalars=scalars, shift=shift, padded=padded)
            for turn in range(rounds):
                views = inputs.fill(
                    self.problem, plan, self.inputs, self._rng(), regime=regime, constants=turn == 0, twists=turn > 0
                )
                if turn == 0:
                    self._prepare(plan, scalars)
                word = inputs.poison(self.cand.outputs, plan, self._rng())
                self.cand.run(0, 0, 1, FIRST_S)
                error, _ = self._check_slot(plan, views, scalars, 0)
                if error is not None:
                    place = {"shape": dict(shape), "regime": regime, "offset_bytes": shift, "padded_rows": padded}
                    self._incorrect(kind, {**place, **error})
                if not inputs.guards_intact(self.cand.outputs, plan, word):
                    raise handle.WorkerFailed("void", "it wrote outside its output", "memory")
        except handle.WorkerFailed as error:
            self.cases[f"{kind}_failed"] = 1
            if hidden:
                raise handle.WorkerFailed(error.status, f"at a hidden case: {error.reason}", error.law) from error
            raise self._with_log(error, f"shape {dict(shape)}, regime {regime}") from error

    def _with_log(self, error: handle.WorkerFailed, where: str) -> handle.WorkerFailed:
        """The error with what the worker said, as long as it cannot have seen anything hidden."""
        said = "" if self.hidden_seen else self.cand.said()
        return handle.WorkerFailed(error.status, f"{where}: {error.reason}. {said}".strip(), error.law)

    def _incorrect(self, kind: str, error: dict[str, Any]) -> None:
        if kind == "visible":
            self.first_error = error
            raise handle.WorkerFailed("incorrect", "wrong result")
        raise handle.WorkerFailed("incorrect", "wrong result (hidden cases are not shown)")

    def _correctness(self) -> None:
        special = [r for r in self.problem.regimes if r != "normal"]
        rng = self._rng()
        dense = self.native
        visible = self.problem.visible
        for index, shape in enumerate(visible):
            self._check_case(shape, regime="normal", hidden=False, shift=0, padded=False, rounds=2)
            if index == 0 and self.mode == "confirm":
                for regime in special:
                    self._check_case(shape, regime=regime, hidden=False, shift=0, padded=False, rounds=1)
        shapes = self.hidden or [dict(visible[-1])]
        for index, regime in enumerate(["normal", *special]):
            self._check_case(
                shapes[index % len(shapes)], regime=regime, hidden=True, rounds=1,
                shift=4 if index % 2 else 0, padded=not dense and index % 3 == 1,
            )  # fmt: skip
        for index, shape in enumerate(shapes):
            regime = str(rng.choice(["normal", *special]))
            self._check_case(
                shape, regime=regime, hidden=True, rounds=2, shift=4 * (index % 3), padded=not dense and index % 2 == 0
            )

    # --- timing ----------------------------------------------------------------------------------------------------

    def judge(self, ceilings: Ceilings | None, budget_s: float, cache_state: str, alpha: float) -> dict[str, Any]:
        """Check, time, conclude; returns the verdict's fields."""
        end = time.monotonic() + budget_s
        self._correctness()
        shapes = self.problem.visible[: 1 if self.mode == "screen" else None]
        results, raw, noise = [], {}, {}
        for index, shape in enumerate(shapes):
            left = (end - time.monotonic()) / (len(shapes) - index)
            timed = self._time(dict(shape), left, cache_state)
            key = ",".join(f"{k}={v}" for k, v in shape.items())
            raw[key] = {**timed.raw, "null_s": timed.null_s, "calls_per_handshake": timed.slots}
            results.append(self._conclude(timed, ceilings, alpha, noise))
        first = results[0]
        fields: dict[str, Any] = self.account() | {
            "status": "valid", "speedup": first.speedup, "claim": first.claim, "threshold": self.threshold,
            "faster": first.faster, "floor_fraction": first.floor_fraction, "per_shape": tuple(results), "raw": raw,
            "medians": {"baseline_s": first.baseline_s, "candidate_s": first.candidate_s}, "noise": noise,
        }  # fmt: skip
        for row in results:
            if row.floor_s is not None and row.candidate_s < row.floor_s * (1 - ceilings.margin if ceilings else 0):
                return fields | {"status": "void", "law": "physics", "faster": False, "reason": (
                    f"{row.candidate_s * 1e6:.2f} µs a call is below the floor of {row.floor_s * 1e6:.2f} µs"
                )}  # fmt: skip
        unresolved = self._unresolved(results, noise)
        return fields | ({"status": "unresolved", "reason": unresolved, "faster": None} if unresolved else {})

    threshold = 1.02

    def _unresolved(self, results: Sequence[ShapeResult], noise: Mapping[str, Any]) -> str:
        for row in results:
            if row.overhead_fraction > MOST_OVERHEAD:
                return f"the ruler's own cost is {row.overhead_fraction:.0%} of the time measured"
            if row.speedup.low == 0.0:
                return f"only {row.speedup.n} pairs were measured before the budget ended"
        if noise.get("delayed_share", 0) > 0.5:
            return "the machine was busy: more than half of the pairs had to wait for a core"
        return ""

    def _time(self, shape: dict[str, int], budget_s: float, cache_state: str) -> _Timed:
        end = time.monotonic() + max(budget_s, 0.2)
        most = self._most_slots(shape)
        scalars = inputs.scalars(self.problem, None)
        plan = self._configure(shape, most, scalars=scalars, both=True)
        inputs.fill(self.problem, plan, self.inputs, self._rng())
        self._prepare(plan, scalars, both=True)
        null = NULL_NATIVE if self.native else NULL
        # The same history for both sides: every slot once, twice over.
        probe = min(most, 8)
        per_call = {}
        for which in (*self.baselines, null):
            self.base.run(which, 0, most, FIRST_S + CALL_S)
            per_call[which] = min(self.base.run(which, 0, probe, CALL_S) for _ in range(3)) / probe
        self.cand.run(0, 0, most, FIRST_S + CALL_S)
        cand = min(self.cand.run(0, 0, probe, CALL_S) for _ in range(3)) / probe
        handshake = min(self.base.run(null, 0, 1, CALL_S) for _ in range(5))
        best = min(self.baselines, key=per_call.__getitem__)
        null_call = max((min(self.base.run(null, 0, most, CALL_S) for _ in range(3)) - handshake) / most, 0)
        honest = max(min(cand, per_call[best]) - handshake / probe - null_call, 1e-8)
        slots = int(min(most, max(1, math.ceil(1.5 * handshake / (honest * MOST_OVERHEAD)))))
        plan = self._configure(shape, slots, scalars=scalars, both=True)
        timed = _Timed(shape, slots, self.baselines[best])
        wanted = 12 if self.mode == "screen" else 40
        limit = CALL_S + 100 * per_call[best] * slots
        turn = 0
        while turn < wanted or time.monotonic() < end and turn < 4 * wanted and not self._narrow(timed):
            if time.monotonic() > end and turn >= 6:
                break
            self._pair(plan, scalars, timed, best, null, turn, limit, cache_state)
            turn += 1
        return timed

    def _narrow(self, timed: _Timed) -> bool:
        interval = stats.speedup(timed.baseline_s, timed.candidate_s)
        return interval.high - interval.low < 0.04 * interval.estimate

    def _pair(self, plan: inputs.Layout, scalars: list[Any], timed: _Timed, best: int, null: int, turn: int,
              limit: float, cache_state: str) -> None:  # fmt: skip
        fresh = turn == 0 or (turn % 16 == 0 and self.candidate.prepares)
        views = inputs.fill(self.problem, plan, self.inputs, self._rng(), constants=fresh, twists=turn > 0)
        if fresh:
            self._prepare(plan, scalars, both=True)
        words = [inputs.poison(side.outputs, plan, self._rng()) for side in (self.base, self.cand)]
        times = {}
        sides = [(self.base, best), (self.cand, 0)]
        waited = 0.0
        for side, which in sides if turn % 2 else reversed(sides):
            if cache_state == "cold":
                _flush()
            before = _waited(side.pid)
            times[side] = side.run(which, 0, plan.slots, limit)
            waited += max(_waited(side.pid) - before, 0) / max(times[side], 1e-9)
        self._check_batch(plan, views, scalars, words[1], timed)
        cost = {self.base: self.null_of_baseline, self.cand: null}
        nulls = {side: self.base.run(which, 0, plan.slots, limit) for side, which in cost.items()}
        timed.null_s.append(nulls[self.cand])
        timed.raw.setdefault("baseline_s", []).append(times[self.base])
        timed.raw.setdefault("candidate_s", []).append(times[self.cand])
        timed.raw.setdefault("baseline_null_s", []).append(nulls[self.base])
        timed.raw.setdefault("waited", []).append(waited)
        if waited > 0.1:
            timed.delayed += 1
        low = [float(np.median(timed.raw["baseline_null_s"])), float(np.median(timed.null_s))]
        timed.baseline_s = [max(t - low[0], 0) / plan.slots for t in timed.raw["baseline_s"]]
        timed.candidate_s = [max(t - low[1], 1e-10) / plan.slots for t in timed.raw["candidate_s"]]

    def _check_batch(self, plan: inputs.Layout, views: list[torch.Tensor | None], scalars: list[Any], word: int,
                     timed: _Timed) -> None:  # fmt: skip
        """Check every output of a timed batch: a few with the full budget, all with one scaled from those."""
        if not inputs.guards_intact(self.cand.outputs, plan, word):
            raise handle.WorkerFailed("void", "it wrote outside its output in a timed call", "memory")
        sample = {int(slot) for slot in self._rng().integers(0, plan.slots, 2)}
        scales = [0.0] * len(plan.outputs)
        for slot in sample:
            error, expected = self._check_slot(plan, views, scalars, slot)
            if error is not None:
                self._incorrect("visible", {"shape": timed.shape, "regime": "timed call", **error})
            for i, what in enumerate(expected):
                if what.truth.is_floating_point() and what.truth.numel():
                    scales[i] = max(scales[i], float((what.budget / _scale(what.truth)).max()))
        for slot in range(plan.slots) if plan.slots > len(sample) else ():
            if slot in sample:
                continue
            arguments = [
                a.float() if isinstance(a, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16) else a
                for a in self._arguments(plan, views, scalars, slot)
            ]
            with torch.no_grad():
                roughly = compare.outputs_of(self.reference(*arguments))
            for i, (place, near) in enumerate(zip(plan.outputs, roughly, strict=True)):
                got = inputs.batch_view(self.cand.outputs, place, plan.slots)[slot]
                fits = got.double().sub(near).abs() <= 4 * scales[i] * _scale(near.double())
                if not bool(fits.all()):
                    error, _ = self._check_slot(plan, views, scalars, slot)
                    if error is not None:
                        self._incorrect("visible", {"shape": timed.shape, "regime": "timed call", **error})

    def _conclude(self, timed: _Timed, ceilings: Ceilings | None, alpha: float, noise: dict[str, Any]) -> ShapeResult:
        for seconds in timed.baseline_s + timed.candidate_s:
            if not (math.isfinite(seconds) and seconds > 0):
                raise handle.WorkerFailed("void", "a time was not positive and finite", "clock")
        interval = stats.speedup(timed.baseline_s, timed.candidate_s, alpha)
        base, cand = float(np.median(timed.baseline_s)), float(np.median(timed.candidate_s))
        least = floor_s(self.problem, timed.shape, ceilings)
        noise["delayed_share"] = max(noise.get("delayed_share", 0.0), timed.delayed / len(timed.baseline_s))
        noise["load"] = os.getloadavg()[0]
        spent = min(np.median(timed.raw["candidate_s"]), np.median(timed.raw["baseline_s"]))
        return ShapeResult(
            shape=timed.shape, speedup=interval, claim=stats.claim(timed.baseline_s, timed.candidate_s),
            baseline_s=base, candidate_s=cand, floor_s=least, floor_fraction=None if least is None else least / cand,
            overhead_fraction=float(np.median(timed.null_s) / spent), calls_per_handshake=timed.slots,
            baseline=timed.baseline, faster=interval.low > self.threshold,
        )  # fmt: skip

    def account(self) -> dict[str, Any]:
        """What is known of the session whatever comes out: cases, confinement, prepare, first error."""
        return {
            "cases": dict(self.cases), "confinement": self.confinement, "prepare": self.prepared,
            "first_error": self.first_error,
        }  # fmt: skip

    def close(self) -> None:
        """End the workers and give all memory back."""
        for side in self.workers:
            side.close()
        if self.inputs is not None:
            self.inputs.close()
            self.inputs = None


def _scale(values: torch.Tensor) -> torch.Tensor:
    """Size of each element plus the root mean square of its row."""
    if not values.dim():
        return values.abs().clamp_min(1e-30)
    return (values.abs() + values.square().mean(-1, keepdim=True).sqrt()).clamp_min(1e-30)


_cache: list[np.ndarray] = []


def _flush() -> None:
    """Drive everything else out of the caches."""
    if not _cache:
        _cache.append(np.zeros(CACHE_BYTES // 8))
    _cache[0] += 1.0


def _waited(pid: int | None) -> float:
    """Seconds that the threads of a process have waited for a core so far (the kernel's figure)."""
    total = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat", "rb") as file:
                total += int(file.read().split()[1])
    except (OSError, IndexError):
        return 0.0
    return total / 1e9


def loop_source(problem: Problem, prepares: bool) -> str:
    """C++ that calls a candidate on several slots in a row, and a function of the same signature that does nothing."""
    types, calls, pointers, numbers = [], [], 0, 0
    packed = not prepares
    for tensor in problem.inputs:
        if tensor.shape is None:
            whole = "int" in tensor.dtype
            types.append("int64_t" if whole else "float")
            calls.append(f"({types[-1]})s[{numbers}]")
            numbers += 1
        elif tensor.constant and prepares and packed:
            continue
        else:
            packed |= tensor.constant
            types.append("const void*")
            calls.append(f"p[{pointers}]")
            pointers += 1
    for _ in problem.outputs:
        types.append("void*")
        calls.append(f"p[{pointers}]")
        pointers += 1
    for position in range(len(problem.axes)):
        types.append("int64_t")
        calls.append(f"a[{position}]")
    signature = ", ".join(types)
    return f"""#include <cstdint>
extern "C" void noop({signature}) {{}}
extern "C" void loop(void (*f)({signature}), void** p, int64_t n, const double* s, const int64_t* a) {{
  for (int64_t i = 0; i < n; ++i, p += {pointers}) f({", ".join(calls)});
}}
"""


def alive(interval: Interval | None) -> bool:
    """Whether an interval was measured at all."""
    return interval is not None
