"""What a round of traffic came to: the rows of its requests and the figures that follow from them.

A failed request counts in `failed` and in nothing else; a figure over no completed request is None, never 0.

Definitions: TTFT = first token − send. E2EL = last token − send. TPOT = (E2EL − TTFT) / (output tokens − 1), requests
of one token left out. ITL = gaps between chunks, so an engine that holds tokens back to send them together shows long
gaps. Throughputs = completed requests, their output tokens, their input + output tokens, over the wall time from the
first send to the last arrival. Goodput = completed requests that meet every limit, over the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels.errors import InputError
from profiles.records import Record
from profiles.workload import Gates, TrafficSpec

RAW_SCHEMA = 1
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
STATISTICS = ("mean", "p50", "p95", "p99")


class RequestRow(Record):
    """One request as the parent saw it. Times are seconds since the start of the round."""

    index: int
    input_tokens: int
    max_tokens: int
    due_s: float
    """When it was to be sent."""
    send_s: float
    """When it was sent: a little after `due_s` where the parent was late."""
    stamps_s: tuple[float, ...] = ()
    """Arrival of each chunk that held tokens."""
    chunks: tuple[int, ...] = ()
    """Tokens in each of these chunks."""
    tokens: tuple[int, ...] = ()
    error: str | None = None
    """Why it counts as failed."""

    @property
    def ttft_ms(self) -> float:
        """Time to the first token; of completed requests only."""
        return 1e3 * (self.stamps_s[0] - self.send_s)

    @property
    def e2el_ms(self) -> float:
        """Time to the last token; of completed requests only."""
        return 1e3 * (self.stamps_s[-1] - self.send_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for a request of one token."""
        return (self.e2el_ms - self.ttft_ms) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Gaps between chunks."""
        return tuple(1e3 * (b - a) for a, b in zip(self.stamps_s, self.stamps_s[1:], strict=False))

    def meets(self, gates: Gates) -> bool:
        """Whether this request, completed, lies within the latency limits."""
        tpot = self.tpot_ms
        return (gates.ttft_p95_ms is None or self.ttft_ms <= gates.ttft_p95_ms) and (
            gates.tpot_p95_ms is None or tpot is None or tpot <= gates.tpot_p95_ms
        )


class Distribution(Record):
    """Mean and percentiles (linear interpolation) of a latency in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None for no values."""
        if not values:
            return None
        p50, p95, p99 = (float(v) for v in np.percentile(values, (50, 95, 99)))
        return cls(mean=statistics.fmean(values), p50=p50, p95=p95, p99=p99, n=len(values))


class Summary(Record):
    """The figures of one or several rounds."""

    completed: int
    failed: int
    duration_s: float
    """From the first send to the last arrival, summed over rounds."""
    input_tokens: int
    """Of completed requests."""
    output_tokens: int
    """Of completed requests."""
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    requests_per_s: float | None
    goodput_rps: float | None
    """Completed requests per second that met the workload's latency limits; without limits all of them."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    peak_memory_bytes: int | None
    """Highest resident set of the engine up to the end of the round, read by the parent."""
    max_send_lag_ms: float
    """How late the parent was at worst; an open loop that lags is no Poisson process."""


class Round(Record):
    """One measured round: untouched rows and what follows from them."""

    seed: int
    hidden: bool
    traffic: TrafficSpec
    rows: tuple[RequestRow, ...]
    summary: Summary

    @property
    def ok(self) -> bool:
        """Whether every request completed."""
        return self.summary.failed == 0

    @property
    def errors(self) -> tuple[str, ...]:
        """The different reasons for failed requests."""
        return tuple(sorted({row.error for row in self.rows if row.error}))

    def metric(self, name: str) -> float | None:
        """A figure by its column name (`COLUMNS`); `ttft_ms` and its like without a suffix are the mean.

        Raises:
            InputError: there is no such metric.
        """
        return metric_of(self.summary, name)

    def raw(self) -> dict[str, Any]:
        """The round as JSON. A hidden round's tokens would tell of its prompts: they are replaced by their digest."""
        value = self.model_dump(mode="json")
        if self.hidden:
            for row in value["rows"]:
                row["tokens"] = "sha256:" + hashlib.sha256(json.dumps(row["tokens"]).encode()).hexdigest()
        return value

    def row(self) -> dict[str, float | int | bool | None]:
        """One flat row with the columns of `COLUMNS`, in their order."""
        return {name: metric_of(self.summary, name) for name in COLUMNS}


class Measurement(Record):
    """Several rounds of one engine, the warm-up left out."""

    metric: str
    rounds: tuple[Round, ...]
    value: float | None
    """Median over rounds; None when a request failed or the metric could not be computed."""
    spread: float
    """(largest − smallest) / median over rounds."""
    stable: bool
    """Whether the last two rounds lie within the tolerance."""
    pruned: bool = False
    """Given up after one round, which was far from the best known."""
    note: str = ""
    """Why there is no value, or why it is not stable."""


COLUMNS: dict[str, tuple[str, str]] = {
    "completed": ("requests", "Requests that gave exactly the tokens asked for"),
    "failed": ("requests", "Requests with an error, too few or too many tokens"),
    "duration_s": ("s", "From the first send to the last arrival"),
    "input_tokens": ("tokens", "Prompt tokens of completed requests"),
    "output_tokens": ("tokens", "Output tokens of completed requests"),
    "output_tokens_per_s": ("tokens/s", "Output tokens of completed requests over the duration"),
    "total_tokens_per_s": ("tokens/s", "Input and output tokens of completed requests over the duration"),
    "requests_per_s": ("requests/s", "Completed requests over the duration"),
    "goodput_rps": ("requests/s", "Completed requests within the latency limits, over the duration"),
    **{
        f"{latency}_{statistic}": ("ms", f"{statistic} of {what}")
        for latency, what in zip(
            LATENCIES,
            ("time to the first token", "time per output token", "gaps between chunks", "time to the last token"),
            strict=True,
        )
        for statistic in STATISTICS
    },
    "peak_memory_bytes": ("bytes", "Highest resident set of the engine so far"),
    "max_send_lag_ms": ("ms", "How late the parent sent a request at worst"),
}
"""Columns of the normalised row: unit and meaning."""


def metric_of(summary: Summary, name: str) -> float | None:
    """A figure of a summary by its column name; see `Round.metric`."""
    if name in LATENCIES:
        name += "_mean"
    if name not in COLUMNS:
        raise InputError(f"There is no metric {name!r}.", remedy=f"Known: {', '.join(COLUMNS)}.", key="metric")
    head, _, tail = name.rpartition("_")
    if head in LATENCIES:
        distribution = getattr(summary, head)
        return None if distribution is None else getattr(distribution, tail)
    return getattr(summary, name)


def summarise(
    rows: Sequence[RequestRow], duration_s: float, gates: Gates, peak_memory_bytes: int | None = None
) -> Summary:
    """Figures of requests that were served within `duration_s` seconds of wall time."""
    done = [row for row in rows if row.error is None]
    inputs, outputs = sum(row.input_tokens for row in done), sum(len(row.tokens) for row in done)

    def per_s(count: float) -> float | None:
        return count / duration_s if done and duration_s > 0 else None

    return Summary(
        completed=len(done),
        failed=len(rows) - len(done),
        duration_s=duration_s,
        input_tokens=inputs,
        output_tokens=outputs,
        output_tokens_per_s=per_s(outputs),
        total_tokens_per_s=per_s(inputs + outputs),
        requests_per_s=per_s(len(done)),
        goodput_rps=per_s(sum(row.meets(gates) for row in done)),
        ttft_ms=Distribution.of([row.ttft_ms for row in done]),
        tpot_ms=Distribution.of([row.tpot_ms for row in done if row.tpot_ms is not None]),
        itl_ms=Distribution.of([gap for row in done for gap in row.itl_ms]),
        e2el_ms=Distribution.of([row.e2el_ms for row in done]),
        peak_memory_bytes=peak_memory_bytes,
        max_send_lag_ms=1e3 * max((row.send_s - row.due_s for row in rows), default=0.0),
    )


def pool(rounds: Sequence[Round], gates: Gates | None = None) -> Summary:
    """Figures over the requests of several rounds, as if they were one: percentiles over all requests."""
    peaks = [r.summary.peak_memory_bytes for r in rounds]
    return summarise(
        [row for r in rounds for row in r.rows],
        sum(r.summary.duration_s for r in rounds),
        gates or Gates(),
        max((p for p in peaks if p is not None), default=None),
    )


def write_raw(path: Path, rounds: Sequence[Round], about: dict[str, Any] | None = None) -> None:
    """Write rounds as one JSON file, atomically: `schema_version`, `about`, `columns`, `rows` (one normalised row a
    round) and `rounds` (every request untouched, but for the tokens of hidden rounds).
    """
    value = {
        "schema_version": RAW_SCHEMA,
        "about": about or {},
        "columns": {name: {"unit": unit, "meaning": meaning} for name, (unit, meaning) in COLUMNS.items()},
        "rows": [r.row() for r in rounds],
        "rounds": [r.raw() for r in rounds],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
    os.replace(temporary, path)
