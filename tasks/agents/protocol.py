"""The two seats that an agent can take: `Planner` (what to try) and `Executor` (how to make it work).

Search and templates take them when there is no key, Claude when there is one. Whoever sits there, the same plain code
scores ideas (`kb.score`), picks the round (`tasks.plan`) and judges candidates (the ruler): an agent's own figures are
claims and stay claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kb.records import Attempt, Conclusion, CrashSet, Idea, Layer, Lesson, Rule, Trial, WarmStart
from kernels.ruler.spec import Candidate, Problem, Shape
from profiles.engines.base import KnobSpec

if TYPE_CHECKING:
    from kernels.ruler.verdict import Verdict

Mode = Literal["screen", "confirm"]


@dataclass(frozen=True)
class Opportunity:
    """One problem of the profile: what it costs today and how far physics lets it go."""

    problem: Problem
    shape: Shape
    """The variable axes as seen in the profile, at the shape that takes most of the time."""
    time_share: float
    """Share of the end-to-end wall time, 0 to 1."""
    headroom: float | None
    """Measured time over time at the roofline, at least 1; None where no ceiling can be trusted."""
    bound: str = "memory"
    """`memory`, `compute` or `overhead`."""
    measured_us: float = 0.0
    """Mean time of one call, microseconds."""
    calls: int = 0
    """Calls in the profiled round."""
    families: tuple[str, ...] = ()
    """Template families that support the problem."""
    sites: tuple[str, ...] = ()
    """What a kernel for it takes the place of (`layers.*.mlp.gate_proj`): two that share a site are alternatives."""
    covers: tuple[str, ...] = ()
    """Operators that a fused problem takes in (`linear`, `silu_mul`); empty for a plain one."""


@dataclass(frozen=True)
class SettingsResult:
    """What the settings search came to."""

    metric: str
    stock_value: float | None
    best_value: float | None
    best_knobs: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    knobs: tuple[KnobSpec, ...] = ()
    """What could be turned, with the operators whose kernels change what a knob is worth."""


@dataclass(frozen=True)
class Left:
    """What is left of a budget."""

    wall_s: float
    campaigns: int
    tokens: int = 0
    dollars: float = 0.0


@dataclass(frozen=True)
class PlanContext:
    """All that a planner gets to see. Its rendering is stored as the scope of every idea planned from it."""

    run_id: str
    round: int
    """Counts from 1."""
    target: str
    """Fingerprint of the machine."""
    target_family: str
    """`cpu`, `cuda`, `rocm`, `neuron`: the widest pool for chances of success."""
    engine: str
    """Engine and version."""
    dtype: str
    opportunities: tuple[Opportunity, ...]
    settings: SettingsResult | None
    ideas: tuple[Idea, ...]
    """The whole tree so far, each idea with its status and latest scores."""
    lessons: tuple[Lesson, ...] = ()
    rules: tuple[Rule, ...] = ()
    crash_sets: tuple[CrashSet, ...] = ()
    left: Left = Left(wall_s=0.0, campaigns=0)
    campaign_s: float = 60.0
    """Seconds that one campaign may take."""
    peer_ratio: float | None = None
    """Best peer's figure over today's, on the workload's objective; above 1 when the peer is ahead."""
    seed: int = 0


@dataclass(frozen=True)
class Proposal:
    """An idea as a planner puts it. Time share, headroom, gain and score are worked out by code from the profile."""

    hypothesis: str
    """One sentence."""
    layer: Layer
    lever: str
    """Operator × approach (`linear × template:linear_bf16`) or knob group (`knobs: threads`)."""
    operator: str
    approach: str
    """What the executor starts from: `template:<family>`, `settings`, `free` (written from nothing)."""
    derivation: str
    """How the expected gain follows from the profile, in a sentence."""
    problem_name: str | None = None
    """Name of the opportunity's problem; None for ideas about settings."""
    parent_id: str | None = None
    accuracy_risk: float = 0.0
    crash_risk: float = 0.0
    cost_minutes: float = 1.0
    time_share: float = 0.0
    """Only read for settings ideas, which have no opportunity: share of the time that the knob can touch."""
    headroom: float = 1.0
    """Only read for settings ideas: today's time over what the knob could reach at best."""
    interacts_with: tuple[str, ...] = ()
    """Settings ideas: operators whose promoted kernels reopen it."""
    settled: str | None = None
    """Why there is nothing to try now (the settings search did it); it enters the tree as `expired`, to be reopened."""
    claims: Mapping[str, Any] = field(default_factory=dict)
    """What the planner believes (an expected speed-up). Stored as a claim, never read by a score."""


class Planner(Protocol):
    """Turns what was measured into ideas."""

    def plan(self, context: PlanContext) -> list[Proposal]:
        """Propose new ideas; none is a valid answer.

        Ideas already in `context.ideas` (same parent, lever and problem) are recognised and not added twice. Must be
        deterministic for equal contexts where no model is asked. Never raises for a poor answer of a model: returns
        what could be read and reports the rest as a claim of the first proposal.
        """


@dataclass(frozen=True)
class CampaignTask:
    """One idea, ready for one executor."""

    campaign_id: str
    """Content key: run, idea, problem, target. The budget is no part of it."""
    idea: Idea
    problem: Problem
    families: tuple[str, ...]
    """Template families allowed for this idea, best first; empty: write from nothing."""
    languages: tuple[str, ...]
    """`cpp`, `triton`, `torch`."""
    budget_s: float
    seed: int
    threads: int
    builds: Path
    """Content-addressed store of build products."""
    cache_state: Literal["warm", "cold"] = "warm"
    """`cold` where the problem reads weights and the model has more of them than the caches hold: then the ruler times
    it on weights that come from memory, as they do in the model."""
    scope: str = ""
    """Text shown to the executor: rules, lessons, profile row. What it saw is what is stored."""
    scope_id: str | None = None
    warm_starts: tuple[WarmStart, ...] = ()
    crash_sets: tuple[CrashSet, ...] = ()
    """Combinations that must not be tried."""
    finished: tuple[Attempt, ...] = ()
    """Attempts of an earlier, interrupted run of this campaign; those with a verdict are not repeated."""
    tokens: int = 0
    dollars: float = 0.0


@dataclass(frozen=True)
class CampaignResult:
    """What an executor came to. `won` needs a confirming verdict of the ruler; everything else has a reason."""

    campaign_id: str
    conclusion: Conclusion
    reason: str
    attempts: tuple[Attempt, ...]
    """All of them, the finished ones handed in included, by number."""
    candidate: Candidate | None = None
    """The best candidate, won or not."""
    verdict: Verdict | None = None
    """The verdict that `candidate` stands on: the confirming one when the campaign won."""
    shapes: tuple[Mapping[str, int], ...] = ()
    """Shapes at which the candidate wins; elsewhere the overlay must not take it."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    constraints: Mapping[str, Any] = field(default_factory=dict)
    claims: Mapping[str, Any] = field(default_factory=dict)
    """What the agent says (rationale, tokens spent). Never read by scores."""


class Executor(Protocol):
    """Works on one idea within its budget."""

    def run(
        self,
        task: CampaignTask,
        judge: Callable[[Candidate, Mode], Verdict],
        report: Callable[[Attempt], None],
    ) -> CampaignResult:
        """Make candidates, have them judged, return the best.

        Args:
            task: what to work on, and within what.
            judge: the ruler behind the device's lease. Blocks while another campaign measures. `screen` is quick and
                tells better from worse; `confirm` is the one that a win stands on. Never raises for a bad candidate: a
                crash is a verdict.
            report: hands over one attempt as soon as it is done, so that a killed campaign resumes after it.

        Returns:
            The result; a failure of the tools (no compiler, judge void) is conclusion `failed` with the reason.
        """
