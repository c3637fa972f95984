"""Drives an engine with requests from the parent and turns what arrived, and when, into figures.

All times are the parent's own: a request is stamped when it is sent, each chunk of tokens when it is in the parent's
hands. What the engine says about its speed is not asked for. A request with an error or the wrong number of tokens is
*failed*: it has no latency and gives no throughput. A figure over no completed request is None, never 0.

Definitions: TTFT = first token − send. E2EL = last token − send. TPOT = (E2EL − TTFT) / (output tokens − 1), requests
of one token left out. ITL = gaps between chunks, so an engine that holds tokens back to send them together shows long
gaps. Throughputs = completed requests, their output tokens, their input + output tokens, over the wall time from the
first send to the last arrival. Goodput = completed requests that meet every limit, over the same time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels.errors import InputError
from profiles.engines.base import Engine, EngineFailure, GenerateRequest, TokenEvent
from profiles.prompts import Prompt, PromptSource
from profiles.records import Record
from profiles.stats import relative_spread
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


def lengths(traffic: TrafficSpec, seed: int, n: int | None = None) -> tuple[list[int], list[int]]:
    """Input and output lengths in tokens of `n` requests (default: a round); exact unless the workload spreads them."""
    n = traffic.requests if n is None else n
    rng = random.Random(f"lengths:{seed}")

    def draw(centre: int) -> int:
        low = max(round(centre * (1 - traffic.length_spread)), 1)
        return rng.randint(low, max(round(centre * (1 + traffic.length_spread)), low))

    if traffic.length_spread == 0:
        return [traffic.input_tokens] * n, [traffic.output_tokens] * n
    return [draw(traffic.input_tokens) for _ in range(n)], [draw(traffic.output_tokens) for _ in range(n)]


def draw_prompts(
    source: PromptSource, traffic: TrafficSpec, seed: int, secret: bytes | None = None
) -> tuple[Prompt, ...]:
    """A round's prompts: hidden ones when there is a secret, else the visible ones of that seed."""
    inputs, _ = lengths(traffic, seed)
    if secret is None:
        return source.visible(seed, len(inputs), inputs)
    return source.hidden(secret, len(inputs), inputs)


def run_round(
    engine: Engine,
    traffic: TrafficSpec,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    gates: Gates | None = None,
    hidden: bool = False,
    exact: bool = True,
    stall_s: float = 120.0,
    limit_s: float = 1800.0,
) -> Round:
    """Serve one round and measure it.

    Args:
        engine: started and idle.
        traffic: how requests arrive and how many tokens each is to give.
        prompts: token ids; their number is the number of requests.
        seed: decides output lengths (where spread) and arrival times.
        gates: latency limits for goodput.
        hidden: marks the round, so that its tokens are not written out.
        exact: the end-of-sequence token is ignored, and any other number of tokens than asked for is a failure.
        stall_s: without any arrival for this long, the engine hangs.
        limit_s: longest round.

    Raises:
        EngineFailure: the engine is gone, or hangs. What was in flight is lost; stop the engine.
    """
    _, outputs = lengths(traffic, seed, len(prompts))
    flight = _Flight(engine, prompts, outputs, exact)
    due = _arrivals(traffic, seed, len(prompts))
    start = last = time.perf_counter()
    while flight.unsent or flight.open:
        now = time.perf_counter() - start
        if now > limit_s:
            raise EngineFailure("hang", f"the round took longer than {limit_s:.0f} s")
        while flight.unsent and (len(flight.open) < traffic.concurrency if due is None else due[flight.sent] <= now):
            flight.send(start, None if due is None else due[flight.sent])
            now = time.perf_counter() - start
        wait = stall_s if due is None or not flight.unsent else min(stall_s, max(due[flight.sent] - now, 0.0))
        if not flight.open:  # an open loop between two arrivals
            time.sleep(wait)
            last = time.perf_counter()
            continue
        try:
            for event in engine.events(max(wait, 1e-3)):
                last = time.perf_counter()
                flight.take(event, start, last)
        except EngineFailure as failure:
            # an open loop looks up often; only a long silence is a hang
            if failure.kind != "hang" or time.perf_counter() - last < stall_s:
                if failure.kind == "hang":
                    continue
                raise
            raise EngineFailure("hang", f"no token for {stall_s:.0f} s; {len(flight.open)} requests waiting") from None
    rows = flight.rows()
    summary = summarise(rows, flight.last_s - rows[0].send_s, gates or Gates(), engine.peak_memory_bytes() or None)
    return Round(seed=seed, hidden=hidden, traffic=traffic, rows=rows, summary=summary)


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


def measure(
    engine: Engine,
    traffic: TrafficSpec,
    source: PromptSource,
    *,
    metric: str = "output_tokens_per_s",
    min_rounds: int = 2,
    max_rounds: int = 5,
    tolerance: float = 0.03,
    seed: int = 0,
    secret: bytes | None = None,
    gates: Gates | None = None,
    deadline: float | None = None,
    stall_s: float = 120.0,
    progress: Callable[[Round], None] | None = None,
) -> Measurement:
    """Measure an engine that is idle between rounds: the first round warms up and is thrown away; then rounds until the
    last two lie within `tolerance` of each other, at least `min_rounds`, at most `max_rounds`.

    Round r gets the visible prompts of seed `1000·seed + r`, so engines measured with one seed see the same; with a
    `secret` it gets hidden prompts of its own instead. After `deadline` (`time.monotonic()`) no further round starts
    once there are `min_rounds`. `progress` is called after each kept round. A failed request ends the measurement.

    Raises:
        EngineFailure: as for `run_round`.
    """
    rounds: list[Round] = []
    note = ""
    for number in range(max_rounds + 1):
        mine = 1000 * seed + number
        key = None if secret is None else hashlib.sha256(secret + number.to_bytes(4)).digest()
        prompts = draw_prompts(source, traffic, mine, key)
        found = run_round(
            engine, traffic, prompts, seed=mine, gates=gates, hidden=key is not None, stall_s=stall_s
        )  # fmt: skip
        if not found.ok or found.metric(metric) is None:
            rounds.append(found)
            note = f"{found.summary.failed} of {len(found.rows)} requests failed: {'; '.join(found.errors)}"
            break
        if number == 0:
            continue
        rounds.append(found)
        if progress is not None:
            progress(found)
        last = [r.metric(metric) or 0.0 for r in rounds[-2:]]
        late = deadline is not None and time.monotonic() > deadline
        if len(rounds) >= min_rounds and (relative_spread(last) <= tolerance or late):
            break
    values = [v for r in rounds if (v := r.metric(metric)) is not None]
    if note or not values:
        return Measurement(metric=metric, rounds=tuple(rounds), value=None, spread=0.0, stable=False, note=note)
    stable = len(values) >= 2 and relative_spread(values[-2:]) <= tolerance
    if not stable:
        note = f"the last two of {len(values)} rounds do not lie within {tolerance:.0%} of each other"
    return Measurement(
        metric=metric,
        rounds=tuple(rounds),
        value=statistics.median(values),
        spread=relative_spread(values),
        stable=stable,
        note=note,
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


def _arrivals(traffic: TrafficSpec, seed: int, n: int) -> list[float] | None:
    """Seconds at which requests are due in an open loop (the first at 0); None for a closed loop."""
    if traffic.mode == "closed":
        return None
    if traffic.rate_rps is None:
        raise InputError("An open loop has no arrival rate.", remedy="Set `rate_rps`.", key="traffic.rate_rps")
    rng = random.Random(f"arrivals:{seed}")
    times = [0.0]
    while len(times) < n:
        times.append(times[-1] + rng.expovariate(traffic.rate_rps))
    return times


@dataclasses.dataclass
class _Request:
    """A request on its way."""

    input_tokens: int
    max_tokens: int
    due_s: float
    send_s: float
    stamps_s: list[float] = dataclasses.field(default_factory=list)
    chunks: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    error: str | None = None


class _Flight:
    """The requests of a round on their way; knows their wire ids, which tell the engine nothing."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], outputs: Sequence[int], exact: bool) -> None:
        self._engine, self._prompts, self._outputs, self._exact = engine, prompts, outputs, exact
        self._requests: dict[str, _Request] = {}
        self.open: set[str] = set()
        self.last_s = 0.0

    @property
    def sent(self) -> int:
        return len(self._requests)

    @property
    def unsent(self) -> bool:
        return self.sent < len(self._prompts)

    def rows(self) -> tuple[RequestRow, ...]:
        return tuple(RequestRow(index=i, **vars(r)) for i, r in enumerate(self._requests.values()))

    def send(self, start: float, due: float | None) -> None:
        """Stamp and send the next request."""
        prompt, tokens, wire = tuple(self._prompts[self.sent]), self._outputs[self.sent], secrets.token_hex(8)
        request = GenerateRequest(id=wire, prompt=prompt, max_tokens=tokens, exact=self._exact)
        send_s = time.perf_counter() - start
        self._engine.submit(request)
        self._requests[wire] = _Request(len(prompt), tokens, send_s if due is None else due, send_s)
        self.open.add(wire)

    def take(self, event: TokenEvent, start: float, now: float) -> None:
        """Book one chunk. Chunks of requests that are not of this round are no business of it."""
        request = self._requests.get(event.request_id)
        if request is None:
            return
        if event.request_id not in self.open:
            request.error = request.error or "sent more after its end"
            return
        at = event.arrived_s - start
        self.last_s = max(self.last_s, at)
        if not request.send_s <= at <= now - start:
            request.error = "a chunk is stamped before its request was sent or after it was read"
        if event.tokens:
            request.stamps_s.append(at)
            request.chunks.append(len(event.tokens))
            request.tokens.extend(event.tokens)
        if event.done or event.error or len(request.tokens) > request.max_tokens:
            self.open.discard(event.request_id)
            request.error = request.error or event.error or self._wrong(request)

    def _wrong(self, request: _Request) -> str | None:
        got = len(request.tokens)
        if got > request.max_tokens or got == 0 or (self._exact and got != request.max_tokens):
            return f"emitted {got} tokens where {request.max_tokens} were asked for"
        if any(not isinstance(t, int) or t < 0 for t in request.tokens):
            return "emitted something that is no token id"
        return None
