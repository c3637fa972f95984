"""What the memory holds. Each record is one immutable file; DuckDB is built from the files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kernels.identity import content_hash

Layer = Literal["settings", "framework", "kernel"]
IdeaStatus = Literal[
    "open", "running", "succeeded", "failed", "deepened", "abandoned", "promoted", "rejected", "expired"
]
Conclusion = Literal["won", "did_not_win", "refused", "failed"]


class Record(BaseModel):
    """Frozen, no unknown keys. `kind` names the table."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def content_hash(self) -> str:
        """SHA-256 over the record as canonical JSON."""
        return content_hash(self.model_dump(mode="json"))


class Provenance(Record):
    """Under which versions a number was measured. Figures whose ruler version differs are not compared."""

    roofloop: str
    ruler: str
    engine: str
    target: str
    """Fingerprint of the machine."""
    workload: str
    """Content hash of the workload."""
    target_family: str = ""
    """`cpu`, `cuda`, `rocm`, `neuron`: the widest pool for chances of success."""
    extra: dict[str, str] = {}


class ScoreParts(Record):
    """score = p_success · gain · urgency · (1 − accuracy_penalty) / cost_minutes."""

    p_success: Annotated[float, Field(ge=0, le=1)]
    gain: float
    """Expected end-to-end gain as a fraction of today's time, capped by time share · (1 − 1/headroom)."""
    urgency: float
    accuracy_penalty: Annotated[float, Field(ge=0, le=1)]
    cost_minutes: float
    score: float
    why: str
    """What made the score change, in a sentence."""
    at: str
    """ISO 8601, UTC."""
    time_share: float | None = None
    """The share that this score was worked out from; None: the idea's own."""
    headroom: float | None = None
    """The headroom that this score was worked out from; None: the idea's own."""


class Idea(Record):
    """A node of the tree."""

    id: str
    run_id: str
    parent_id: str | None = None
    hypothesis: str
    layer: Layer
    lever: str
    """Operator × approach, or knob group: `linear × packed-bf16`, `knobs: threads`."""
    operator: str
    problem_id: str | None = None
    problem_name: str | None = None
    approach: str
    """Which executor family works on it: `template:linear_bf16`, `settings`, ..."""
    time_share: Annotated[float, Field(ge=0, le=1)]
    headroom: Annotated[float, Field(ge=1)]
    """Measured time over time at the roofline."""
    derivation: str
    """How the expected gain follows from the profile."""
    accuracy_risk: Annotated[float, Field(ge=0, le=1)] = 0.0
    crash_risk: Annotated[float, Field(ge=0, le=1)] = 0.0
    cost_minutes: float = 1.0
    status: IdeaStatus = "open"
    sites: tuple[str, ...] = ()
    """What it takes the place of in the model; ideas that share a site are alternatives."""
    axes: dict[str, int] = {}
    """The problem's axes at the shape that counts most."""
    interacts_with: tuple[str, ...] = ()
    """Settings ideas: operators whose promoted kernels reopen it."""
    reason: str = ""
    """Why it has this status."""
    scores: tuple[ScoreParts, ...] = ()
    """Every score it ever had, oldest first."""
    scope_id: str | None = None


class Attempt(Record):
    """One candidate of a campaign and what the ruler said."""

    campaign_id: str
    number: int
    candidate_id: str
    verdict_id: str | None
    status: str
    """The verdict's status, or `not_judged`."""
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    claim: float | None = None
    parameters: dict[str, Any] = {}
    seconds: float = 0.0
    mode: Literal["screen", "confirm"] = "screen"
    note: str = ""


class Outcome(Record):
    """What a campaign came to: did it work, did it fail, under what constraints, why."""

    campaign_id: str
    run_id: str
    idea_id: str
    operator: str
    lever: str
    problem_name: str
    conclusion: Conclusion
    reason: str
    candidate_id: str | None = None
    verdict_id: str | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    attempts: int = 0
    seconds: float = 0.0
    parameters: dict[str, Any] = {}
    shapes: tuple[dict[str, int], ...] = ()
    axes: dict[str, int] = {}
    """All axes at the shape that counts most, for lessons."""
    dtype: str = ""
    constraints: dict[str, Any] = {}
    """Threads, budget, confinement, neighbours: under what it holds."""
    claims: dict[str, Any] = {}
    """What the agent said. Never read by scores."""
    provenance: Provenance
    at: str


class EndToEnd(Record):
    """One end-to-end comparison: stack + winner against stack."""

    id: str
    run_id: str
    purpose: Literal["baseline", "settings", "promotion", "final"]
    idea_id: str | None = None
    stack_id: str
    against_stack_id: str | None = None
    metric: str
    value: float | None = None
    against_value: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    visible_ratio: float | None = None
    hidden_ratio: float | None = None
    accuracy: dict[str, Any] = {}
    decision: Literal["promoted", "rejected", "measured"] = "measured"
    reason: str = ""
    raw_file: str = ""
    """Path of the untouched raw result, relative to the run's folder."""
    provenance: Provenance
    at: str


class Trial(Record):
    """One trial of the settings search."""

    run_id: str
    number: int
    role: Literal["default", "search", "default_again"] = "search"
    """The first trial and the last are the engine's defaults: what lies between them is drift."""
    knobs: dict[str, str | int | float | bool]
    resolved_hash: str | None = None
    resolved: dict[str, Any] = {}
    status: Literal[
        "complete", "duplicate", "pruned", "crash", "out_of_memory", "hang", "refused", "start", "gate_failed"
    ]
    """`pruned`: measured in one round only, which was far from the best trial's."""
    metric: str
    value: float | None = None
    gates: dict[str, Any] = {}
    reason: str = ""
    seconds: float = 0.0
    provenance: Provenance
    at: str


class Lesson(Record):
    """Knowledge made from outcomes."""

    id: str
    operator: str
    shape_class: str
    dtype: str
    target: str
    engine: str
    lever: str
    statement: str
    axes: dict[str, int] = {}
    """All axes of the problem it was learnt on."""
    parameters: dict[str, Any] = {}
    """A tuned configuration that warm-starts like problems."""
    speedup: float | None = None
    """Measured over the baseline, where one was."""
    source: str = ""
    """`outcome`, or for seed knowledge where it is from."""
    evidence: tuple[str, ...] = ()
    wins: int = 0
    losses: int = 0
    last_confirmed: str = ""
    expires: str | None = None


class Rule(Record):
    """An instruction shown to agents."""

    id: str
    text: str
    scope: dict[str, str] = {}
    origin: str
    wins: int = 0
    losses: int = 0
    retired: str | None = None


class Evidence(Record):
    """One event in the life of a lesson, a rule or a crash set. Wins and losses are counted from these."""

    subject: Literal["lesson", "rule", "crash_set"]
    subject_id: str
    effect: Literal["win", "loss", "seen", "retired", "restored"]
    because: str
    """Id of the outcome or end-to-end row it follows from; for `retired` and `restored` also a sentence."""
    at: str
    expires: str | None = None
    """New end of the subject's life, when this event moved it."""


class CrashSet(Record):
    """A combination of knobs or parameters that crashes, hangs, runs out of memory or gives wrong results."""

    id: str
    scope: dict[str, str]
    combination: dict[str, str | int | float | bool]
    failure: str
    detail: str
    versions: dict[str, str]
    seen: int = 1
    expires: str | None = None


class Scope(Record):
    """Exactly what an agent, or the offline planner, was shown."""

    id: str
    run_id: str
    purpose: str
    """`plan` or `campaign:<id>`."""
    text: str
    lessons: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    crash_sets: tuple[str, ...] = ()
    at: str


class ProfileRow(Record):
    """One operator at one shape."""

    operator: str
    shape: str
    """The axes as text: `m=8 n=576 k=576`."""
    problem_name: str | None = None
    dtype: str = ""
    calls: int = 0
    time_us: float = 0.0
    """All calls together, microseconds of the profiled time."""
    time_share: float = 0.0
    flops: float = 0.0
    """Operations of one call."""
    bytes: float = 0.0
    """Fewest bytes, read and written, of one call."""
    roofline_us: float | None = None
    """Time of one call at the roofline, microseconds."""
    bound: str = ""
    """`memory`, `compute`, `overhead`, or empty where no ceiling is trusted."""
    headroom: float | None = None


class Profile(Record):
    """Where the time of one profiled round went."""

    id: str
    run_id: str
    round: int
    stack_id: str
    wall_us: float
    attributed_share: float
    """Share of the wall time that the rows account for."""
    rows: tuple[ProfileRow, ...]
    provenance: Provenance
    at: str


class VerdictFile(Record):
    """A verdict of the ruler, kept as the ruler wrote it, with the campaign it belongs to."""

    id: str
    run_id: str
    campaign_id: str | None = None
    candidate_id: str = ""
    problem_name: str = ""
    mode: str = ""
    verdict: dict[str, Any]
    """The ruler's own JSON, its hash inside."""
    at: str


class Campaign(Record):
    """An idea handed to an executor, with all that it was given."""

    id: str
    run_id: str
    round: int
    idea_id: str
    operator: str
    lever: str
    problem_name: str
    families: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    budget_s: float
    seed: int
    threads: int
    scope_id: str | None = None
    warm_starts: tuple[dict[str, Any], ...] = ()
    crash_sets: tuple[str, ...] = ()
    at: str


class IdeaEvent(Record):
    """One change of an idea's status. The tree of today is what its events come to."""

    run_id: str
    idea_id: str
    number: int
    """Counts from 1 for each idea; a number is given once."""
    status: IdeaStatus
    reason: str
    cause: str = ""
    """Id of the outcome or end-to-end row that made the change."""
    at: str


class Rescore(Record):
    """New scores of the ideas whose score changed, in one stroke."""

    id: str
    run_id: str
    cause: str
    scores: dict[str, ScoreParts]
    """By idea id."""
    excluded: dict[str, str] = {}
    """Open ideas that may not be picked, by id, with the reason."""
    at: str


class Claim(Record):
    """What an agent said. Another table than measurements, and never read by a score."""

    run_id: str
    subject: str
    """Campaign or idea id."""
    claims: dict[str, Any]
    at: str


class WarmStart(Record):
    """A configuration that was best on a like problem, to be tried first."""

    parameters: dict[str, Any]
    lesson_id: str
    distance: float
    """0 for the very shape; else doublings between the shapes (`kb.lessons.distance`)."""
    relaxed: tuple[str, ...] = ()
    """Fields of the scope key that differ, in the order they were given up: `shape`, `engine`, `target`, `dtype`."""
    note: str
