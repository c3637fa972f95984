"""One verdict's measurement: correctness cases, the timed pairs, the hidden cases, and what follows from them.

Order matters. Visible cases and the timed calls (all at visible shapes) come first and may be shown in full; hidden
shapes reach the worker last, so nothing that it says or computes before can speak of them, and afterwards only counts
leave the ruler.
"""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import numpy as np
import torch

from kernels.errors import InputError
from kernels.ruler import compare, handle, inputs, stats, worker
from kernels.ruler.spec import Shape
from kernels.ruler.timing import MOST_OVERHEAD, Timed, flush
from kernels.ruler.workers import CALL_S, COMPILE_S, COMPILED, FIRST_S, LIBRARY, OPTIONAL, Terms, Workers

ROUNDS = {"quick": (6, 10), "screen": (6, 24), "confirm": (4, 24)}
SESSIONS = {"quick": 1, "screen": 1, "confirm": 3}
"""Rounds of a session before a narrow interval ends it, and at most; sessions (of fresh workers) in a verdict."""
UNLIKE = 3
"""How much larger the candidate's batch may need to be before the two sides have batches of different sizes."""
SINGLES = 4
"""Runs of one call in each session."""
HOPELESS = 1.1
"""torch.compile that was slower than the fastest baseline by this at one shape is not compiled anew for the next."""

DEAR_S, DEAR_SHARE = 0.1, 0.125
"""A full check that takes longer than this is made for this share of the timed batches."""


class Session(Workers):
    """What is asked of the workers for one verdict, and what has come of it so far."""

    def __init__(self, terms: Terms, template: handle.Template) -> None:
        super().__init__(terms, template)
        self.reference = compare.load_reference(terms.problem.reference)
        self.batched = True
        self.scales: dict[str, tuple[list[float], list[float]]] = {}
        """By visible shape: the largest budget per output as a share of its size, and what a full check last took."""
        self.cases: dict[str, Any] = {
            "visible": 0, "visible_failed": 0, "hidden": 0, "hidden_failed": 0, "timed_calls": 0, "worst": 0.0,
            "figures": [],
        }  # fmt: skip
        self.hidden_seen = False
        self.compile_s = 0.0
        """What torch.compile took: of no budget, since no candidate can help it."""
        self.first_error: dict[str, Any] | None = None
        self.notes: dict[str, str] = {}

    @property
    def mode(self) -> str:
        """Key of `ROUNDS` and `SESSIONS`."""
        return "confirm" if self.terms.confirm else "screen" if self.terms.thorough else "quick"

    # --- checking --------------------------------------------------------------------------------------------------

    def _arguments(self, plan: inputs.Layout, views: inputs.Views, scalars: list[Any], slot: int) -> list[Any]:
        return [
            scalar if view is None else view[slot % plan.sets if tensor.constant else slot]
            for tensor, view, scalar in zip(self.problem.inputs, views, scalars, strict=True)
        ]

    def _check_slot(
        self, plan: inputs.Layout, arguments: list[Any], slot: int, side: handle.Worker | None = None
    ) -> tuple[dict[str, Any] | None, list[compare.Expected], float]:
        """The outputs of one slot (the candidate's, or `side`'s) against full expectations.

        Returns:
            (first error, expectations, error / budget)
        """
        terms = compare.summed(self.problem, dict(plan.axes))
        expected = compare.expect(self.problem, self.reference, arguments, terms, int(self._rng().integers(1 << 31)))
        worst = 0.0
        for place, tensor, what in zip(plan.outputs, self.problem.outputs, expected, strict=True):
            got = inputs.batch_view((side or self.cand).outputs, place, plan.slots)[slot]
            if what.truth.shape != got.shape:
                raise InputError(
                    f"The reference gives shape {tuple(what.truth.shape)}, the problem says {tuple(got.shape)}.",
                    remedy="Make outputs and reference agree.", file=self.problem.name, key=tensor.name,
                )  # fmt: skip
            figure, error = compare.error_of(got, what)
            worst = max(worst, figure)
            if error is not None:
                return {"output": tensor.name, **error}, expected, figure
        if side is None:
            self.cases["worst"] = max(self.cases["worst"], worst)
        return None, expected, worst

    def _case(
        self,
        shape: Shape,
        regime: str,
        *,
        target: int | None = None,
        shift: int = 0,
        padded: bool = False,
        rounds: int = 1,
    ) -> None:
        """One correctness case: fresh values, a call, every element compared; then the same with small changes."""
        kind = "hidden" if self.hidden_seen else "visible"
        where = {"shape": dict(shape), "regime": regime, "offset_bytes": shift, "padded_rows": padded}
        self.cases[kind] += 1
        scalars = inputs.scalars(self.problem, self._rng() if self.hidden_seen else None)
        plan = self._plan(shape, 1, shift=shift, padded=padded)
        try:
            self._configure(plan, scalars)
            for turn in range(rounds):
                views = self._fill(plan, regime=regime, target=target, constants=turn == 0, twists=turn > 0)
                if turn == 0:
                    self._prepare(plan, scalars, all_sides=False)
                word = inputs.poison(self.cand.outputs, plan, self._rng())
                self.cand.run(0, 0, 1, FIRST_S)
                error, _, figure = self._check_slot(plan, self._arguments(plan, views, scalars, 0), 0)
                if not inputs.guards_intact(self.cand.outputs, plan, word):
                    raise handle.WorkerFailed("void", "it wrote outside its output", "memory")
                if not self.hidden_seen:
                    self.cases["figures"].append({**where, "error_over_budget": figure if figure < 1e9 else None})
                if error is not None:
                    self._wrong({**where, **error})
        except handle.WorkerFailed as error:
            self.cases[f"{kind}_failed"] += 1
            if self.hidden_seen:
                raise handle.WorkerFailed(error.status, f"at a hidden case: {error.reason}", error.law) from error
            text = f"{error.reason} (shape {dict(shape)}, regime {regime}). {self.cand.said()}".strip()
            raise handle.WorkerFailed(error.status, text, error.law) from error

    def _wrong(self, error: dict[str, Any]) -> None:
        if not self.hidden_seen:
            self.first_error = error
        raise handle.WorkerFailed("incorrect", "wrong result")

    def check_visible(self) -> None:
        """Every visible shape, and at the smallest of them every regime (in confirm mode at the first one too)."""
        special = [regime for regime in self.problem.regimes if regime != "normal"]
        if not self.terms.thorough:
            self._case(self.problem.visible[0], "normal", rounds=2)
            return
        for shape in self.problem.visible:
            self._case(shape, "normal", rounds=2)
        least = min(self.problem.visible, key=lambda shape: self._plan(shape, 1).input_bytes)
        floats = sum(tensor.shape is not None and "float" in tensor.dtype for tensor in self.problem.inputs)
        for regime in special:  # those that meet one input at a time meet each of the first four
            for target in range(min(floats, 4) if regime in ("denormal", "nonfinite") else 1):
                self._case(least, regime, target=target)
            if self.terms.confirm and least is not self.problem.visible[0]:
                self._case(self.problem.visible[0], regime)

    def check_hidden(self) -> None:
        """Hidden shapes, offsets of four bytes, rows that are not adjacent, other scalars, every regime."""
        self.hidden_seen = True
        special = [regime for regime in self.problem.regimes if regime != "normal"]
        python = self.terms.candidate.language != "cpp"
        shapes = self.hidden or [dict(shape) for shape in self.problem.visible[-1:]]
        rng = self._rng()
        if not self.terms.thorough:
            small = min(shapes, key=lambda shape: self._plan(shape, 1).input_bytes)
            self._case(small, str(rng.choice(["normal", *special])), shift=4, padded=python)
            return
        for index, shape in enumerate(shapes):
            regime = str(rng.choice(["normal", *special]))
            self._case(shape, regime, rounds=2, shift=4 * (index % 3), padded=python and index % 2 == 0)
        for index, regime in enumerate(["normal", *special]):
            self._case(
                shapes[int(rng.integers(len(shapes)))], regime, shift=4 * (index % 2), padded=python and index % 3 == 0
            )

    def _check_batch(self, plan: inputs.Layout, views: inputs.Views, scalars: list[Any], word: int) -> None:
        """Every output of a timed batch, and the guards around them."""
        self.cases["timed_calls"] += plan.slots
        if not inputs.guards_intact(self.cand.outputs, plan, word):
            raise handle.WorkerFailed("void", "it wrote outside its output in a timed call", "memory")
        self._check_timed(plan, views, scalars, list(range(plan.slots)))

    def _check_timed(self, plan: inputs.Layout, views: inputs.Views, scalars: list[Any], slots: list[int]) -> None:
        """The outputs of timed calls: one with its full budget, all others with one scaled from that.

        Where full budgets take long, a drawn part of the batches has one; the rest goes by the scale of those before.
        """
        shape = {k: plan.axes[k] for k in self.problem.visible[0]}
        where = {"shape": shape, "regime": "timed call"}
        scales, cost_s = self.scales.setdefault(str(shape), ([0.0] * len(plan.outputs), [0.0]))
        known = all(scales) and cost_s[0] > DEAR_S and self._rng().random() > DEAR_SHARE
        sample = set() if known else {slots[int(self._rng().integers(len(slots)))]}
        for slot in sample:
            began = time.monotonic()
            error, expected, _ = self._check_slot(plan, self._arguments(plan, views, scalars, slot), slot)
            cost_s[0] = time.monotonic() - began
            if error is not None:
                self._wrong({**where, **error})
            fresh = [
                float((what.budget / _size(what.truth, rows=what.truth.dim() > 0)).max())
                if what.truth.is_floating_point() and what.truth.numel()
                else 0.0
                for what in expected
            ]
            scales[:] = fresh
        doubtful = torch.zeros(len(slots), dtype=torch.bool)
        for place, scale, near in zip(plan.outputs, scales, self._nearly(plan, views, scalars, slots), strict=True):
            got = _widened(inputs.batch_view(self.cand.outputs, place, plan.slots)[slots])
            fits = (got - near).abs() <= 4 * scale * _size(near, rows=len(place.shape) > 0)
            doubtful |= ~fits.reshape(len(slots), -1).all(1).cpu()
        for slot in {slots[int(i)] for i in doubtful.nonzero().flatten()} - sample:
            error, _, _ = self._check_slot(plan, self._arguments(plan, views, scalars, slot), slot)
            if error is not None:
                self._wrong({**where, **error})

    def _nearly(
        self, plan: inputs.Layout, views: inputs.Views, scalars: list[Any], slots: list[int]
    ) -> list[torch.Tensor]:
        """The reference in float32 (or wider) on these slots: each output as [len(slots), *shape]."""
        with torch.no_grad():
            if plan.sets == 1 and self.batched and len(slots) > 1:
                given = [
                    scalar if view is None else _widened(view[0] if tensor.constant else view[slots])
                    for tensor, view, scalar in zip(self.problem.inputs, views, scalars, strict=True)
                ]
                dims = tuple(None if t.shape is None or t.constant else 0 for t in self.problem.inputs)
                try:
                    return compare.outputs_of(torch.vmap(self.reference, in_dims=dims)(*given))
                except Exception:  # whatever a reference does that cannot be batched
                    self.batched = False
            every = []
            for slot in slots:
                arguments = self._arguments(plan, views, scalars, slot)
                every.append(compare.outputs_of(self.reference(*[_widened(a) for a in arguments])))
            return [torch.stack(one) for one in zip(*every, strict=True)]

    # --- timing ----------------------------------------------------------------------------------------------------

    def choose(self, shape: dict[str, int]) -> Timed:
        """The fastest baseline at a visible shape, and how many calls go into one handshake."""
        return self._choose(shape, inputs.scalars(self.problem, None), min(self._most_slots(shape), 16))

    def time(self, timed: Timed, budget_s: float) -> None:
        """More rounds at one visible shape, until the interval is narrow or the budget is spent."""
        scalars = inputs.scalars(self.problem, None)
        end = time.monotonic() + budget_s
        plan = self._plan(timed.shape, timed.slots)
        self._configure(plan, scalars, timed.baseline_slots)
        self._fill(plan)
        self._prepare(plan, scalars, all_sides=True)
        limit = CALL_S + 100 * timed.expected_s * timed.slots
        for _ in range(2):  # the same history on all sides: every slot, twice
            for side in self.sides:
                side.run(*self._call(side, timed), FIRST_S + limit)
        least, greatest = ROUNDS[self.mode]
        # Below so many rounds there is no interval: they are made even when the budget is spent.
        owed = -(-stats.least_pairs(self.terms.alpha) // SESSIONS[self.mode])
        calls, faults = {self.base: 0, self.cand: 0}, {s: s.page_faults() for s in (self.base, self.cand)}
        gc.disable()
        try:
            for number in range(greatest):
                late = time.monotonic() > end and number >= owed
                if late or (number >= least and self._narrow(timed)):
                    break
                for turn in range(timed.sides):
                    self._turn(plan, scalars, timed, turn=number * timed.sides + turn, limit=limit)
                    calls[self.base] += timed.baseline_slots
                    calls[self.cand] += timed.slots
            for side, name in ((self.base, "baseline"), (self.cand, "candidate")):
                timed.faults[name] = (side.page_faults() - faults[side]) / max(calls[side], 1)
            if self.terms.confirm:
                self._singly(plan, scalars, timed, limit)
        finally:
            gc.enable()

    def _choose(self, shape: dict[str, int], scalars: list[Any], probe: int) -> Timed:
        """Choose the fastest baseline, and so many calls a handshake that it costs little.

        Both by `probe` calls; where those are over too soon to tell, by sixteen times as many.
        """
        plan = self._plan(shape, probe)
        self._configure(plan, scalars, probe)
        views = self._fill(plan)
        self._prepare(plan, scalars, all_sides=True)
        native = self.terms.candidate.language == "cpp"
        slow, fast = (
            float(np.median([self._cost(plan, kind, 0) for _ in range(5)]))
            for kind in (self._native_baseline(), native)
        )
        quick: dict[int, float] = {}
        for which in list(self.baselines):
            try:
                first_s = self.base.run(which, 0, probe, COMPILE_S if which == COMPILED else FIRST_S + CALL_S)
                self.compile_s += first_s if which == COMPILED else 0.0
                spent = min(self.base.run(which, 0, probe, CALL_S) for _ in range(3)) - slow
                wrong = None
                if which == LIBRARY and spent < min(quick.values()):
                    wrong, _, _ = self._check_slot(plan, self._arguments(plan, views, scalars, 0), 0, self.base)
                if wrong is not None:
                    raise handle.WorkerFailed("incorrect", "its results are out of the budget")
                quick[which] = spent
            except handle.WorkerFailed as error:
                if which not in OPTIONAL:
                    raise
                name = self.baselines.pop(which)
                self.notes[name] = f"left out: {error.reason} {self.base.said()[-200:]}".strip()
        which = min(quick, key=quick.__getitem__)
        self.cand.run(0, 0, probe, FIRST_S + CALL_S)
        ours = min(self.cand.run(0, 0, probe, CALL_S) for _ in range(3)) - fast
        most = self._most_slots(shape)
        if probe < most and min(ours / fast, quick[which] / slow) < 2:
            return self._choose(shape, scalars, min(16 * probe, most))
        self.notes |= {f"{self.baselines[w]}, {shape}": f"{seconds / probe:.3g} s" for w, seconds in quick.items()}
        if quick[which] > 10 * slow and quick.get(COMPILED, 0.0) > HOPELESS * quick[which]:
            del self.baselines[COMPILED]
        self.chosen.add(which)
        slots, baseline_slots = (
            int(min(most, max(1, math.ceil(3 * probe * cost / max(spent, 1e-8) / MOST_OVERHEAD))))
            for cost, spent in ((fast, ours), (slow, quick[which]))
        )
        if slots < UNLIKE * baseline_slots:  # the first call of a batch costs more: batches must be alike
            slots = baseline_slots = max(slots, baseline_slots)
        return Timed(
            shape, slots, baseline_slots, which, self.baselines[which],
            max(quick[which], 1e-6) / probe, len(self.sides),
        )  # fmt: skip

    def _call(self, side: handle.Worker, timed: Timed) -> tuple[int, int, int]:
        """Function, first slot and number of calls of a run of one side."""
        return (0, 0, timed.slots) if side is self.cand else (timed.which, 0, timed.baseline_slots)

    def _narrow(self, timed: Timed) -> bool:
        """Stopping looks at the interval's width only, never at where it lies."""
        kept = timed.rounds(calm=True)
        if len(kept) < stats.least_pairs(self.terms.alpha):
            return False
        interval = stats.speedup(timed.per_call("baseline", kept), timed.per_call("candidate", kept), self.terms.alpha)
        return interval.high - interval.low < 0.02 * interval.estimate

    def _turn(self, plan: inputs.Layout, scalars: list[Any], timed: Timed, *, turn: int, limit: float) -> None:
        """Fresh values for all, then baseline and candidate in changing order on the same values, then the checks."""
        again = turn == 0 or (turn % 16 == 0 and any(tensor.constant for tensor in self.problem.inputs))
        views = self._fill(plan, constants=again, twists=turn > 0)
        if again:
            self._prepare(plan, scalars, all_sides=True)
        word = 0
        shift = turn % len(self.sides)
        times, waited = {}, 0.0
        for side in self.sides[shift:] + self.sides[:shift]:
            # The ruler's last touches before each run are the same for all sides, so that the caches are.
            poison = inputs.poison(side.outputs, plan, self._rng())
            word = poison if side is self.cand else word
            self.memory.bytes[: plan.input_bytes].max()
            if self.terms.cold:
                flush()
            ran, waiting = side.cpu_s()
            times[side] = side.run(*self._call(side, timed), limit)
            after = side.cpu_s()
            # Its own threads waiting for each other do not count: only time in which none of them had the core.
            idle = times[side] * len(self.policy.cpus or (0,)) - (after[0] - ran)
            waited = max(waited, min(after[1] - waiting, max(idle, 0.0)) / times[side])
        timed.add(baseline=times[self.base], candidate=times[self.cand], waited=waited)
        if self.twin is not None:
            timed.add(twin=times[self.twin])
        native = self.terms.candidate.language == "cpp"
        # One figure for both sides where they are called in one way: the second of two handshakes costs less.
        kinds = sorted({native, self._native_baseline()}, reverse=turn % 2 == 0)
        costs = {kind: self._cost(plan, kind, 0) for kind in kinds}
        timed.add(candidate_cost=costs[native], baseline_cost=costs[self._native_baseline()])
        if native and not self._native_baseline():
            timed.add(copy=self._cost(plan, False, timed.baseline_slots))
        self._check_batch(plan, views, scalars, word)

    def _singly(self, plan: inputs.Layout, scalars: list[Any], timed: Timed, limit: float) -> None:
        """A sample with one input per handshake: what only a batch makes fast shows here."""
        for slot in self._rng().integers(0, timed.baseline_slots, SINGLES):
            views = self._fill(plan, constants=False)
            inputs.poison(self.cand.outputs, plan, self._rng())
            timed.add(candidate_single=self.cand.run(0, int(slot), 1, limit))
            timed.add(baseline_single=self.base.run(timed.which, int(slot), 1, limit))
            self._check_timed(plan, views, scalars, [int(slot)])

    def trace(self) -> list[str]:
        """Names of torch operators that one more call of a Python candidate dispatched: a claim, no proof."""
        try:
            self.cand.said()
            self.cand.send(worker.TRACE, {"which": 0}, FIRST_S)
            names = self.cand.said().split()
        except (handle.WorkerFailed, KeyError):
            return []
        return sorted(
            {n for n in names[:200] if n.startswith("aten::") and hasattr(torch.ops.aten, n[6:].split(".")[0])}
        )

    def account(self) -> dict[str, Any]:
        """What is known whatever comes out: cases, confinement, prepare, first error."""
        return {
            "baselines": self.notes, "cases": dict(self.cases), "confinement": self.confinement,
            "prepare": self.prepared,
            "first_error": self.first_error,
        }  # fmt: skip


def _widened(value: Any) -> Any:
    return (
        value.float() if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value
    )


def _size(values: torch.Tensor, *, rows: bool) -> torch.Tensor:
    """Size of each element, plus the root mean square of its row where there are rows."""
    size = values.abs() if values.is_floating_point() else values.double().abs()
    return (size + size.square().mean(-1, keepdim=True).sqrt() if rows else size).clamp_min(1e-30)
