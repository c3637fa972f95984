"""The executor that needs no model: it tunes templates by seeded search, screens them quickly and confirms the best.

What it does depends on the task, the seed and the verdicts alone (and on the clock, which only decides when it ends),
so a campaign that was killed goes the same way again: attempts handed in are told to the search and not judged anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import optuna

from kb.records import Attempt, Conclusion
from kernels.ruler.build import BuildFailed, build
from kernels.ruler.spec import Candidate, Shape
from kernels.templates import Family, families
from tasks.agents.protocol import CampaignResult, CampaignTask, Mode

if TYPE_CHECKING:
    from kernels.ruler.verdict import Verdict

Judge = Callable[[Candidate, Mode], "Verdict"]
Report = Callable[[Attempt], None]

SETTLED = ("valid", "incorrect", "build_failed")
"""Statuses that another try would not change; others (crash, timeout, void, unresolved) are tried again."""

RANKED = ("valid", "unresolved")
"""Statuses whose speed-up says what to confirm: an unresolved screen is a bad measurement, not a bad candidate."""

BLAMED = ("incorrect", "build_failed", "crashed", "timeout", "out_of_memory", "void")
"""Statuses without a speed: the search is told that this was no good."""


@dataclass(frozen=True)
class OfflineExecutor:
    """`Executor` over the templates of `kernels.templates`.

    Args:
        patience: screening ends after so many new candidates in a row without a better one.
        confirm_best: how many of the best are confirmed in full, one after the other, until one wins. Each further one
            is another chance for luck, so they are few.
        confirm_share: the part of the budget that is kept for confirming.
        max_screens: never more candidates than this.
    """

    patience: int = 12
    confirm_best: int = 3
    confirm_share: float = 0.5
    max_screens: int = 64

    def run(self, task: CampaignTask, judge: Judge, report: Report) -> CampaignResult:
        """Tune, confirm, conclude. See `tasks.agents.protocol.Executor.run`."""
        return _Campaign(self, task, judge, report).run()


@dataclass(frozen=True)
class Tried:
    """A candidate with what its screening came to."""

    candidate: Candidate
    status: str
    speedup: float | None


@dataclass
class _Campaign:
    """One run of one campaign."""

    plan: OfflineExecutor
    task: CampaignTask
    judge: Judge
    report: Report
    start_s: float = field(default_factory=time.monotonic)
    attempts: list[Attempt] = field(default_factory=list)
    tried: dict[str, Tried] = field(default_factory=dict)
    longest_s: float = 0.0
    """Longest judgement so far: none is begun that would not fit into what is left."""
    skipped: int = 0
    """Points left out because a crash set covers them."""

    def run(self) -> CampaignResult:
        self.attempts = sorted(self.task.finished, key=lambda attempt: attempt.number)
        choice = self._families()
        if not choice:
            return self._result("failed", f"no template supports {self.task.problem.name} in the languages allowed")
        screening_s = self.task.budget_s * (1 - self.plan.confirm_share)
        for place, family in enumerate(choice, 1):
            self._screen(family, self.start_s + screening_s * place / len(choice))
        return self._confirm()

    def _families(self) -> list[Family]:
        if "cpp" not in self.task.languages:
            return []
        known = {family.name: family for family in families(self.task.problem.operator)}
        names = [name.removeprefix("template:") for name in self.task.families] or list(known)
        return [known[name] for name in names if name in known and known[name].supported(self.task.problem)]

    def _screen(self, family: Family, until_s: float) -> None:
        """Judge points of `family` until time, patience or the space runs out."""
        search = _Search(family, self.task)
        finished = {a.candidate_id: a for a in self.task.finished if a.mode == "screen" and a.status in SETTLED}
        best, idle, screens = 0.0, 0, 0
        with _Ahead(self.task) as ahead:
            for trial, parameters in search.points():
                if self._crashes(family, parameters):
                    self.skipped += 1
                    search.tell(trial, None)
                    continue
                candidate = family.render(parameters, self.task.problem)
                known = self.tried.get(candidate.id)
                if known is None:
                    earlier = finished.get(candidate.id)
                    if earlier is None and not self._time_for(until_s, screens):
                        break
                    known = self._known(candidate, earlier) if earlier else self._judge_one(candidate, "screen")[1]
                    screens += 1
                    better = known.speedup is not None and known.speedup > best * 1.01
                    best, idle = (known.speedup or best, 0) if better else (best, idle + 1)
                search.tell(trial, known.speedup)
                if idle >= self.plan.patience or screens >= self.plan.max_screens:
                    break
                ahead.build(search.next_of(self.tried))

    def _time_for(self, until_s: float, screens: int) -> bool:
        """The first candidate, the default, is judged whatever the budget: without a verdict nothing was learnt."""
        return screens == 0 or time.monotonic() + self.longest_s <= until_s

    def _known(self, candidate: Candidate, attempt: Attempt) -> Tried:
        self.tried[candidate.id] = Tried(candidate, attempt.status, attempt.speedup)
        return self.tried[candidate.id]

    def _crashes(self, family: Family, parameters: Mapping[str, Any]) -> bool:
        seen = {"family": family.name, **parameters}
        return any(
            held.combination and all(seen.get(key) == value for key, value in held.combination.items())
            for held in self.task.crash_sets
        )

    def _judge_one(self, candidate: Candidate, mode: Mode) -> tuple[Verdict, Tried]:
        began = time.monotonic()
        verdict = self.judge(candidate, mode)
        seconds = time.monotonic() - began
        self.longest_s = max(self.longest_s, seconds)
        speedup = verdict.speedup
        attempt = Attempt(
            campaign_id=self.task.campaign_id,
            number=1 + max((attempt.number for attempt in self.attempts), default=0),
            candidate_id=candidate.id,
            verdict_id=verdict.id,
            status=verdict.status,
            speedup=speedup.estimate if speedup else None,
            low=speedup.low if speedup else None,
            high=speedup.high if speedup else None,
            claim=verdict.claim,
            parameters={"family": candidate.origin.removeprefix("template:"), **candidate.parameters},
            seconds=seconds,
            mode=mode,
            note=verdict.reason,
        )
        self.attempts.append(attempt)
        self.report(attempt)
        fit = verdict.status in RANKED and speedup is not None
        tried = Tried(candidate, verdict.status, speedup.estimate if fit and speedup else None)
        if mode == "screen":
            self.tried[candidate.id] = tried
        return verdict, tried

    def _confirm(self) -> CampaignResult:
        """The first of the best that wins in full; else the reason why none did."""
        ranked = sorted(
            (tried for tried in self.tried.values() if tried.speedup is not None),
            key=lambda tried: (-(tried.speedup or 0.0), tried.candidate.id),
        )
        if not ranked:
            return self._without_speed()
        deadline = self.start_s + self.task.budget_s
        last: tuple[Candidate, Verdict] | None = None
        for place, tried in enumerate(ranked[: self.plan.confirm_best]):
            hopeless = (tried.speedup or 0.0) <= 1.0
            if place and (hopeless or time.monotonic() + self.longest_s > deadline):
                break
            if hopeless:
                break
            verdict, _ = self._judge_one(tried.candidate, "confirm")
            if wins(verdict):
                shapes = winning_shapes(verdict)
                reason = f"confirmed {verdict.claim or 0.0:.2f}× (claim) at {_shape_text(shapes)}"
                return self._result("won", reason, tried.candidate, verdict, shapes)
            if last is None or verdict.status == "valid":
                last = (tried.candidate, verdict)
        if last is None:
            best = ranked[0]
            reason = f"the best of {len(self.tried)} candidates screened at {best.speedup:.2f}×: nothing to confirm"
            return self._result("did_not_win", reason, best.candidate)
        candidate, verdict = last
        return self._result(_conclusion(verdict), _why(verdict), candidate, verdict)

    def _without_speed(self) -> CampaignResult:
        counts: dict[str, int] = {}
        for tried in self.tried.values():
            counts[tried.status] = counts.get(tried.status, 0) + 1
        said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        if any(status in BLAMED for status in counts):
            notes = [attempt.note for attempt in self.attempts if attempt.note and attempt.status in BLAMED]
            first = f"; first: {notes[0].splitlines()[0]}" if notes else ""
            return self._result("refused", f"no candidate passed the ruler ({said}){first}")
        if not self.tried and self.skipped:
            return self._result("refused", f"crash sets cover all {self.skipped} points that were drawn")
        return self._result("failed", f"no verdict with a speed within {self.task.budget_s:g} s ({said or 'none'})")

    def _result(
        self,
        conclusion: Conclusion,
        reason: str,
        candidate: Candidate | None = None,
        verdict: Verdict | None = None,
        shapes: tuple[Shape, ...] = (),
    ) -> CampaignResult:
        parameters: dict[str, Any] = {}
        if candidate is not None:
            parameters = {"family": candidate.origin.removeprefix("template:"), **candidate.parameters}
        return CampaignResult(
            campaign_id=self.task.campaign_id,
            conclusion=conclusion,
            reason=reason,
            attempts=tuple(self.attempts),
            candidate=candidate,
            verdict=verdict,
            shapes=shapes,
            parameters=parameters,
            seconds=time.monotonic() - self.start_s,
            constraints={"threads": self.task.threads, "screened": len(self.tried), "crash_sets_skipped": self.skipped},
        )


class _Search:
    """Points of one family: the default, warm starts, then TPE; where it repeats itself, neighbours of the best."""

    def __init__(self, family: Family, task: CampaignTask) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.family, self.task = family, task
        sampler = optuna.samplers.TPESampler(
            multivariate=True, group=False, constant_liar=False, n_startup_trials=6, seed=task.seed
        )
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.best: tuple[float, dict[str, Any]] | None = None
        self.current: dict[str, Any] = {}
        self.study.enqueue_trial(dict(family.default))
        for start in task.warm_starts:
            parameters = {key: start.parameters[key] for key in family.space if key in start.parameters}
            if start.parameters.get("family", family.name) == family.name and family.legal(parameters):
                self.study.enqueue_trial(parameters, skip_if_exists=True)

    def points(self) -> Iterator[tuple[optuna.Trial, dict[str, Any]]]:
        """Trials with their parameters; ends when the space has nothing new nearby."""
        seen: set[tuple[Any, ...]] = set()
        repeats = 0
        while repeats < 30:
            trial = self.study.ask()
            # Choices are told apart by their place: TPE takes them as categories, whatever their type.
            parameters = {key: trial.suggest_categorical(key, choices) for key, choices in self.family.space.items()}
            key = tuple(parameters.values())
            repeats = repeats + 1 if key in seen else 0
            if key in seen and self.best is not None:
                fresh = (p for p in self.family.neighbours(self.best[1]) if tuple(p.values()) not in seen)
                if (near := next(fresh, None)) is not None:
                    self.study.enqueue_trial(near)
            seen.add(key)
            self.current = parameters
            yield trial, parameters

    def tell(self, trial: optuna.Trial, speedup: float | None) -> None:
        """Report a speed-up, or None for a point that is no good."""
        if speedup is None:
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        self.study.tell(trial, speedup)
        if self.best is None or speedup > self.best[0]:
            self.best = (speedup, self.current)

    def next_of(self, tried: Mapping[str, Tried]) -> Candidate | None:
        """A candidate that is likely to come soon: the first neighbour of the best that was not tried."""
        if self.best is None:
            return None
        near = (self.family.render(p, self.task.problem) for p in self.family.neighbours(self.best[1]))
        return next((candidate for candidate in near if candidate.id not in tried), None)


class _Ahead:
    """Builds what may come next while another is judged, where a core is free: else it would disturb the clock."""

    def __init__(self, task: CampaignTask) -> None:
        self.task = task
        self.pool = ThreadPoolExecutor(1) if (os.cpu_count() or 1) > task.threads else None
        self.pending: Future[None] | None = None

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def build(self, candidate: Candidate | None) -> None:
        """Start building `candidate`, unless a build is under way."""
        if self.pool is not None and candidate is not None and (self.pending is None or self.pending.done()):
            self.pending = self.pool.submit(self._build, candidate)

    def _build(self, candidate: Candidate) -> None:
        with suppress(BuildFailed):  # the ruler will say so when its turn comes
            build(candidate, self.task.problem, self.task.builds)


def winning_shapes(verdict: Verdict) -> tuple[Shape, ...]:
    """Visible shapes at which the verdict says that the candidate is faster."""
    return tuple(dict(result.shape) for result in verdict.per_shape if result.faster)


def wins(verdict: Verdict) -> bool:
    """Whether a win can stand on this verdict: valid, faster at the shape that counts most, work of its own."""
    return (
        verdict.status == "valid"
        and bool(verdict.faster)
        and bool(winning_shapes(verdict))
        and verdict.provenance.get("verdict") != "vendor"
    )


def _conclusion(verdict: Verdict) -> Conclusion:
    if verdict.status == "unresolved":
        return "failed"
    if verdict.status in BLAMED or verdict.provenance.get("verdict") == "vendor":
        return "refused"
    return "did_not_win"


def _why(verdict: Verdict) -> str:
    if verdict.reason:
        return verdict.reason
    if verdict.speedup is None:
        return f"the confirming measurement is {verdict.status}"
    low, high = verdict.speedup.low, verdict.speedup.high
    threshold = f" is not above {verdict.threshold:.3f}" if verdict.threshold else " does not show a gain"
    return f"confirmed at {verdict.speedup.estimate:.2f}×, and its interval {low:.2f} to {high:.2f}{threshold}"


def _shape_text(shapes: tuple[Shape, ...]) -> str:
    return "; ".join(
        ", ".join(f"{axis}={size}" for axis, size in shape.items()) or "its only shape" for shape in shapes
    )
