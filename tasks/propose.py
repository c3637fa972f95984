"""Which settings to try next: a pure function of the trials so far, the seed and the knobs.

Failed trials teach by the combination that they can be narrowed down to, missed gates as violated constraints. Optuna's
study is built anew from the trials for each proposal, so there is no second state that a kill could leave behind.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kb.records import CrashSet, Trial
from profiles.engines.base import Knob, KnobSpec
from profiles.workload import Workload, higher_is_better

ENUMERABLE = 40
"""Up to so many points all are ordered by prediction; above, Optuna proposes."""
FAILURES = ("crash", "out_of_memory", "hang", "refused", "start")
MEASURED = ("complete", "duplicate", "pruned")
"""Statuses of trials whose value counts; only the first can win."""
Point = tuple[Knob, ...]
"""One choice per searched knob, in the order of the knobs."""


@dataclass(frozen=True)
class KnobEffect:
    """How much the best choice of one knob gave over its base, all else equal."""

    knob: str
    choice: Knob
    ratio: float
    """Geometric mean over pairs of trials that differ in this knob only; above 1 is better."""
    pairs: int


@dataclass(frozen=True)
class Space:
    """The knobs that are turned, and those that are held."""

    names: tuple[str, ...]
    choices: tuple[tuple[Knob, ...], ...]
    base: Point
    """Where the search starts: the defaults, where they are among the choices."""
    defaults: Mapping[str, Knob]
    fixed: Mapping[str, Knob]

    @staticmethod
    def of(workload: Workload, knobs: Sequence[KnobSpec]) -> Space:
        """The space that workload and engine leave."""
        fixed, override = workload.engine.knobs, workload.engine.search
        turned = [
            (k, override.get(k.name, k.choices)) for k in knobs if k.name not in fixed and override.get(k.name, (1,))
        ]
        return Space(
            names=tuple(k.name for k, _ in turned),
            choices=tuple(choices for _, choices in turned),
            base=tuple(k.default if k.default in choices else choices[0] for k, choices in turned),
            defaults={k.name: k.default for k in knobs},
            fixed=fixed,
        )

    @property
    def axes(self) -> list[tuple[tuple[Knob, ...], Knob]]:
        """(choices, base) of each knob."""
        return list(zip(self.choices, self.base, strict=True))

    @property
    def size(self) -> int:
        """How many points there are."""
        return math.prod(map(len, self.choices))

    def knobs(self, point: Point) -> dict[str, Knob]:
        """What is asked of the engine: the knobs that leave their defaults."""
        asked = {n: v for n, v in zip(self.names, point, strict=True) if not _same(v, self.defaults[n])}
        return {**asked, **self.fixed}

    def full(self, knobs: Mapping[str, Knob]) -> dict[str, Knob]:
        """Every knob with its value."""
        return {**self.defaults, **knobs}

    def point(self, knobs: Mapping[str, Knob]) -> Point | None:
        """The point of those knobs; None when a value is not among today's choices."""
        full = self.full(knobs)
        if any(not _same(full.get(n, v), v) for n, v in self.fixed.items()):
            return None
        found = []
        for name, choices in zip(self.names, self.choices, strict=True):
            match = [c for c in choices if _same(c, full[name])]
            if not match:
                return None
            found.append(match[0])
        return tuple(found)


def propose(
    space: Space,
    trials: Sequence[Trial],
    *,
    seed: int,
    metric: str,
    crash_sets: Sequence[CrashSet] = (),
    limit: int = 100,
) -> Point | None:
    """The next point to try; None when none is left. A function of its arguments only.

    The base first, then one knob at a time (all first alternatives, then all second ones; at most half of `limit` where
    not everything can be tried), then the combination of what helped, then by predicted value or by Optuna's TPE.
    """
    points = [(p, t) for t in trials if t.role != "default_again" and (p := space.point(t.knobs)) is not None]
    seen = {p for p, _ in points}
    excluded = exclusions(space, trials, crash_sets)

    def open_(point: Point) -> bool:
        return point not in seen and not _excluded(space, point, excluded)

    if open_(space.base):
        return space.base
    small = space.size <= ENUMERABLE
    screened = sum(_distance(p, space.base) == 1 for p in seen)
    few = screened < max(len(space.names), limit // 2) and len(seen) < limit - 1
    if space.size <= limit or few:
        for point in _screen(space):
            if open_(point):
                return point
    effects = _effects(space, points, metric)
    combined = tuple(_best_choice(i, choices, base, effects) for i, (choices, base) in enumerate(space.axes))
    if open_(combined):
        return combined
    if small:
        rest = [p for p in itertools.product(*space.choices) if open_(p)]

        def predicted(point: Point) -> float:
            return math.prod(effects.get((i, c), 1.0) for i, c in enumerate(point))

        return max(rest, key=predicted, default=None)
    return _tpe(space, points, open_, seed * 1_000_003 + len(trials), metric)


def exclusions(
    space: Space, trials: Sequence[Trial], crash_sets: Sequence[CrashSet] = ()
) -> list[tuple[dict[str, Knob], str]]:
    """Combinations that are not tried: known crash sets, and what this search's failures can be narrowed down to."""
    out = [(dict(c.combination), f"known to fail: {c.failure} ({c.detail})") for c in crash_sets]
    good = [space.full(t.knobs) for t in trials if t.status not in FAILURES]
    for trial in trials:
        if trial.status in FAILURES and trial.role == "search":
            out.append((shrink(space.full(trial.knobs), good, space.defaults), f"trial {trial.number}: {trial.status}"))
    return out


def shrink(
    failed: Mapping[str, Knob], good: Sequence[Mapping[str, Knob]], defaults: Mapping[str, Knob]
) -> dict[str, Knob]:
    """The smallest combination of changed knobs that no working point holds; all changed knobs when that is ambiguous.

    Args:
        failed: every knob of the point that failed.
        good: every knob of each point that ran.
        defaults: the engine's defaults: a knob at its default is not to blame.
    """
    changed = {n: v for n, v in failed.items() if n not in defaults or not _same(v, defaults[n])}
    for size in range(1, len(changed) + 1):
        suspects = [
            combination
            for combination in itertools.combinations(changed.items(), size)
            if not any(all(n in g and _same(g[n], v) for n, v in combination) for g in good)
        ]
        if len(suspects) == 1:
            return dict(suspects[0])
        if suspects:
            break
    return changed


def knob_effects(space: Space, trials: Sequence[Trial], metric: str) -> tuple[KnobEffect, ...]:
    """For each knob its best choice against the base choice, from pairs of trials that differ in nothing else."""
    points = [(p, t) for t in trials if t.role != "default_again" and (p := space.point(t.knobs)) is not None]
    rows = []
    for i, name in enumerate(space.names):
        ratios = {c: _pair_ratios(space, points, metric, i, c) for c in space.choices[i] if not _same(c, space.base[i])}
        best = max(
            ((statistics.geometric_mean(r), len(r), c) for c, r in ratios.items() if r),
            key=lambda x: x[0],
            default=None,
        )
        if best is not None:
            rows.append(KnobEffect(name, best[2], best[0], best[1]))
    return tuple(sorted(rows, key=lambda e: -e.ratio))


def violation(gates: Mapping[str, Any]) -> float:
    """How far the gates of a trial are missed: 0 when all pass, else the sum of relative excesses (1 where unknown)."""
    total = 0.0
    for gate in gates.values():
        if gate.get("ok") is True:
            continue
        value, limit = gate.get("value"), gate.get("limit")
        known = isinstance(value, int | float) and isinstance(limit, int | float) and limit
        total += max(1e-6, abs(value / limit - 1)) if gate.get("ok") is False and known else 1.0
    return total


def _screen(space: Space) -> Iterator[Point]:
    """The base with one knob changed: every knob's first alternative, then every knob's second."""
    others = [[c for c in choices if not _same(c, b)] for choices, b in zip(space.choices, space.base, strict=True)]
    for nth in range(max(map(len, others), default=0)):
        for i, alternatives in enumerate(others):
            if nth < len(alternatives):
                yield (*space.base[:i], alternatives[nth], *space.base[i + 1 :])


def _effects(space: Space, points: Sequence[tuple[Point, Trial]], metric: str) -> dict[tuple[int, Knob], float]:
    """What a choice is worth against the base choice; 0 where the one change alone already failed."""
    effects: dict[tuple[int, Knob], float] = {}
    for i, choices in enumerate(space.choices):
        for choice in choices:
            if _same(choice, space.base[i]):
                continue
            alone = (*space.base[:i], choice, *space.base[i + 1 :])
            if any(p == alone and not _good(t) for p, t in points):
                effects[i, choice] = 0.0
            elif ratios := _pair_ratios(space, points, metric, i, choice):
                effects[i, choice] = statistics.geometric_mean(ratios)
    return effects


def _pair_ratios(space: Space, points: Sequence[tuple[Point, Trial]], metric: str, i: int, choice: Knob) -> list[float]:
    sign = 1 if higher_is_better(metric) else -1
    values = {p: t.value for p, t in points if _good(t) and t.value}
    return [
        (value / base) ** sign
        for p, value in values.items()
        if _same(p[i], choice) and (base := values.get((*p[:i], space.base[i], *p[i + 1 :])))
    ]


def _tpe(
    space: Space, points: Sequence[tuple[Point, Trial]], open_: Callable[[Point], bool], seed: int, metric: str
) -> Point | None:
    """Optuna's proposal among the open points, from a study made of the trials so far."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Numbers in order become an integer range over their indices, so that neighbours are known to be neighbours.
    ordered = {
        n: len(c) > 2
        and all(isinstance(x, int | float) and not isinstance(x, bool) for x in c)
        and list(c) == sorted(c)
        for n, c in zip(space.names, space.choices, strict=True)
    }
    kinds: dict[str, BaseDistribution] = {
        n: IntDistribution(0, len(c) - 1) if ordered[n] else CategoricalDistribution(list(range(len(c))))
        for n, c in zip(space.names, space.choices, strict=True)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=min(5, len(points)), multivariate=True, group=True, constant_liar=True, seed=seed % 2**32
        )
        study = optuna.create_study(sampler=sampler, direction="maximize" if higher_is_better(metric) else "minimize")
        for point, trial in points:
            failed = trial.status in FAILURES or trial.value is None
            study.add_trial(
                optuna.trial.create_trial(
                    state=optuna.trial.TrialState.PRUNED if failed else optuna.trial.TrialState.COMPLETE,
                    value=None if failed else trial.value,
                    params={n: c.index(v) for n, c, v in zip(space.names, space.choices, point, strict=True)},
                    distributions=kinds,
                    constraints={"runs": 1.0 if failed else 0.0, "gates": violation(trial.gates)},
                )
            )
        for _ in range(30):
            asked = study.ask(kinds).params
            point = tuple(c[asked[n]] for n, c in zip(space.names, space.choices, strict=True))
            if open_(point):
                return point
    draw = random.Random(seed)
    for _ in range(200):
        point = tuple(draw.choice(choices) for choices in space.choices)
        if open_(point):
            return point
    return next(filter(open_, itertools.islice(itertools.product(*space.choices), 100_000)), None)


def _good(trial: Trial) -> bool:
    return trial.status in MEASURED


def _excluded(space: Space, point: Point, excluded: Sequence[tuple[Mapping[str, Knob], str]]) -> bool:
    full = space.full(space.knobs(point))
    return any(all(n in full and _same(full[n], v) for n, v in combination.items()) for combination, _ in excluded)


def _same(a: Knob, b: Knob) -> bool:
    """Equal and of one kind: True is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _distance(a: Point, b: Point) -> int:
    return sum(not _same(x, y) for x, y in zip(a, b, strict=True))


def _best_choice(i: int, choices: Sequence[Knob], base: Knob, effects: Mapping[tuple[int, Knob], float]) -> Knob:
    return max(choices, key=lambda choice: (effects.get((i, choice), 1.0), _same(choice, base)))
