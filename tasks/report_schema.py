"""The schema of `report.json`, version 1: what other programs may rely on.

Fields are only added within a version; a field that changes its meaning makes a new version.
"""

from __future__ import annotations

from typing import Any, Literal

from profiles.records import Record


class Interval(Record):
    """A ratio with its interval."""

    estimate: float
    low: float
    high: float
    n: int = 0
    """Pairs of rounds behind it."""
    level: float = 0.95


class LayerGain(Record):
    """What one layer gave, as a ratio over the stack without it."""

    layer: Literal["settings", "framework", "kernel"]
    ratio: Interval | None
    """None when nothing of that layer was promoted."""
    how: str
    """Where the ratio comes from: which comparison, or the product of which."""


class MeasuredRow(Record):
    """One normalised end-to-end row."""

    label: str
    stack_id: str
    settings: dict[str, Any]
    """The resolved settings, every knob with the value in force."""
    settings_hash: str
    kernels: tuple[str, ...]
    value: float | None = None
    """The workload's objective: median over the rounds, in the metric's unit."""
    metrics: dict[str, float | None]
    """Metric by name with its unit in the name: `output_tokens_per_s`, `ttft_p50_ms`, `tpot_p95_ms`, `failed`, ..."""
    rounds: int


class OperatorRow(Record):
    """Time of one operator before and after."""

    operator: str
    phase: str
    before_ms: float | None
    after_ms: float | None
    time_share: float
    """Share of the wall time before."""
    roofline_ms: float | None
    bound: str
    gap: float | None
    """Time before over time at the roofline."""


class CampaignRow(Record):
    """One campaign and everything that the ruler said in it."""

    campaign_id: str
    round: int = 0
    hypothesis: str
    layer: Literal["settings", "framework", "kernel"] = "kernel"
    operator: str
    problem: str
    lever: str
    conclusion: str
    reason: str
    speedup: Interval | None
    claim: float | None
    floor_fraction: float | None
    attempts: tuple[dict[str, Any], ...]
    seconds: float
    end_to_end: Interval | None
    decision: str
    """`promoted`, `rejected`, or empty where it did not come to an end-to-end comparison."""


class Refusal(Record):
    """Something that was tried and not kept."""

    what: str
    layer: str
    stage: Literal["settings", "ruler", "end_to_end", "plan"]
    reason: str


class KernelInStack(Record):
    """One promoted kernel, as deployed."""

    problem: str
    operator: str
    candidate_id: str
    verdict_id: str
    language: str
    file: str
    """Path relative to the run's folder."""
    shapes: tuple[dict[str, int], ...]
    taken: int | None
    """Calls taken during the final accuracy gate."""
    fell_back: int | None
    prepare_s: float | None
    prepared_bytes: int | None


class StackReport(Record):
    """The stack as files to deploy."""

    stack_id: str
    folder: str
    standing: Literal["confirmed", "provisional", "rejected"] = "provisional"
    """`confirmed` against stock in fresh engines; `provisional` until then; `rejected` by that: not to be deployed."""
    settings: dict[str, Any]
    kernels: tuple[KernelInStack, ...]


class BudgetReport(Record):
    """What the run was allowed and what it took."""

    wall_s: float
    used_s: float
    by_stage_s: dict[str, float]


class Report(Record):
    """Everything that a run found out."""

    schema_version: Literal[1] = 1
    run_id: str
    workload: dict[str, Any]
    target: dict[str, Any]
    status: Literal["finished", "unfinished", "failed"]
    stop_reason: str
    metric: str
    speedup: Interval | None
    """The final stack over stock, in fresh engines. None before that was measured, and where stock stays."""
    confirmed: bool
    """True when that comparison decided for the final stack: faster for sure, and through every gate."""
    decision: str = ""
    """Why it was decided so; empty before."""
    by_layer: tuple[LayerGain, ...]
    accuracy: dict[str, Any]
    """`status`, `reason` (with the power of the test), `measured_on`, `scored_tokens`, `stock_tokens` and `checks`:
    `name`, `status`, `value`, `limit`, `detectable` (smallest worsening that would have been seen), `detail`."""
    baseline: MeasuredRow | None
    best: MeasuredRow | None
    peers: tuple[dict[str, Any], ...]
    operators: tuple[OperatorRow, ...]
    profile: dict[str, Any] = {}
    """`wall_ms`, `attributed_share` and `notes` of the first profile; `after_wall_ms` of the final stack's.

    Wall times are those of the rounds that the operators' times are from, the stopwatches' own time taken out."""
    trials: tuple[dict[str, Any], ...]
    settings_search: dict[str, Any] = {}
    """`best` (knobs), `reason`, `drift` (of the defaults, |last / first − 1|) and `stopped`."""
    ideas: tuple[dict[str, Any], ...]
    campaigns: tuple[CampaignRow, ...]
    refused: tuple[Refusal, ...]
    stack: StackReport | None
    versions: dict[str, str]
    noise: dict[str, Any]
    budget: BudgetReport
    ledger_head: str
    generated_at: str
