"""The ruler as campaigns use it: measurements one at a time per device, builds beside them where a core is spare."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kernels.ruler.build import BuildFailed, build
from kernels.ruler.floor import Ceilings
from kernels.ruler.lease import device_lease
from kernels.ruler.spec import Candidate, Problem
from kernels.ruler.stats import alpha_of_try
from kernels.ruler.verdict import Mode, Verdict
from tasks.run_state import read_json, write_json

Step = Callable[[str, Callable[[], Verdict]], Verdict]
"""Runs a judgement under a name, for instance as a task of its own."""

SETTLED = ("valid", "incorrect", "build_failed")
"""Verdicts that another try would not change. The others (crashed, timeout, void, unresolved, …) are tried again."""


@dataclass(frozen=True)
class Bench:
    """Where and how candidates of one run are judged."""

    builds: Path
    leases: Path
    device: str
    """Name of the lease: `cpu`, `cuda:0`."""
    threads: int
    ceilings: Callable[[Problem], Ceilings | None]
    """Ceilings for a problem's working set; None where the target's are not trusted."""
    confinement: str = "best"
    """Least level that is good enough; `best` takes the best there is."""
    screen_s: float = 3.0
    confirm_s: float = 15.0
    cache_state: Literal["warm", "cold"] = "warm"

    def for_campaign(self, budget_s: float, cache_state: Literal["warm", "cold"]) -> Bench:
        """With measurements that fit into a campaign of so many seconds."""
        screen_s, confirm_s = min(self.screen_s, budget_s / 8), min(self.confirm_s, 0.4 * budget_s)
        return replace(self, screen_s=screen_s, confirm_s=confirm_s, cache_state=cache_state)

    def _spare_core(self) -> bool:
        """Whether a compiler may run beside a measurement without being measured too."""
        return self.device != "cpu" or (os.cpu_count() or 1) > self.threads

    def judge(self, problem: Problem, candidate: Candidate, mode: Mode, alpha: float = 0.05) -> Verdict:
        """Build, wait for the device, judge. A bad candidate is a verdict; only a broken machine raises.

        `alpha`: level of the interval.
        """
        from kernels.ruler.judge import judge

        def measure() -> Verdict:
            return judge(
                problem,
                candidate,
                mode=mode,
                ceilings=self.ceilings(problem),
                threads=self.threads,
                builds=self.builds,
                budget_s=self.screen_s if mode == "screen" else self.confirm_s,
                confinement=self.confinement,
                cache_state=self.cache_state,
                alpha=alpha,
                thorough=mode == "confirm",
            )

        try:
            with contextlib.nullcontext() if self._spare_core() else device_lease(self.leases, self.device):
                build(candidate, problem, self.builds)
        except BuildFailed:
            return measure()  # ends at the build: nothing is timed, so it need not wait for the device
        with device_lease(self.leases, self.device):
            return measure()


@dataclass(frozen=True)
class Notebook:
    """Candidates and verdicts of one campaign on disk: what was judged is not judged again after a kill."""

    folder: Path

    def verdict(self, candidate_id: str, mode: Mode) -> Verdict | None:
        """The settled verdict on this candidate, if there is one whose content is what the ruler wrote."""
        held = read_json(self.folder / "verdicts" / f"{candidate_id}.{mode}.json")
        if held is None:
            return None
        try:
            verdict = Verdict.from_json(held)
        except ValueError:
            return None
        return verdict if verdict.status in SETTLED else None

    def _alpha(self) -> float:
        """The level of the next confirmation: all of a campaign together have 5 % for one false keep."""
        held = (read_json(file) for file in (self.folder / "attempts").glob("*.json"))
        return alpha_of_try(1 + sum(one is not None and one.get("mode") == "confirm" for one in held))

    def keep(self, candidate: Candidate, verdict: Verdict) -> None:
        """Write both down."""
        from tasks.codec import to_json

        write_json(self.folder / "candidates" / f"{candidate.id}.json", to_json(candidate))
        write_json(self.folder / "verdicts" / f"{candidate.id}.{verdict.mode}.json", verdict.to_json())

    def judge_with(
        self,
        bench: Bench,
        problem: Problem,
        kept: Callable[[Verdict], None] = lambda _: None,
        step: Step = lambda _, work: work(),
    ) -> Callable[[Candidate, Mode], Verdict]:
        """The judge that an executor is given; `kept` hears of each new verdict, `step` runs what makes one."""

        def judge(candidate: Candidate, mode: Mode) -> Verdict:
            held = self.verdict(candidate.id, mode)
            if held is not None and held.problem_id == problem.id:
                return held
            alpha = self._alpha() if mode == "confirm" else 0.05
            name = f"{mode} {candidate.id[:8]} · {problem.name}"
            verdict = step(name, lambda: bench.judge(problem, candidate, mode, alpha))
            self.keep(candidate, verdict)
            kept(verdict)
            return verdict

        return judge
