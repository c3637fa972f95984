"""Drives an engine with requests from the parent and turns what arrived, and when, into figures.

All times are the parent's own: a request is stamped when it is sent, each chunk of tokens when it is in the parent's
hands. What the engine says about its speed is not asked for. A request with an error or the wrong number of tokens is
*failed*: it has no latency and gives no throughput. A figure over no completed request is None, never 0.

The records and their definitions are in `profiles.rounds`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence

from kernels.errors import InputError
from profiles.engines.base import Engine, EngineFailure, GenerateRequest, TokenEvent
from profiles.prompts import Prompt, PromptSource
from profiles.rounds import COLUMNS, Measurement, RequestRow, Round, Summary, metric_of, pool, summarise, write_raw
from profiles.stats import relative_spread
from profiles.workload import Gates, TrafficSpec

__all__ = [
    "COLUMNS",
    "Measurement",
    "RequestRow",
    "Round",
    "Summary",
    "draw_prompts",
    "lengths",
    "measure",
    "metric_of",
    "pool",
    "run_round",
    "summarise",
    "write_raw",
]


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
        flight.send_due(start, due, traffic.concurrency)
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
                flight.send_due(start, due, traffic.concurrency)  # an engine that never pauses must not delay it
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
    warm_up_tokens: int | None = None,
    hopeless: Callable[[float], bool] | None = None,
) -> Measurement:
    """Measure an engine that is idle between rounds: the first round warms up and is thrown away; then rounds until the
    last two lie within `tolerance` of each other, at least `min_rounds`, at most `max_rounds`.

    `warm_up_tokens` caps the output of the warm-up. Where `hopeless` says so of the first kept round's figure, that
    round is all: the measurement is `pruned`.

    Round r gets the visible prompts of seed `1000·seed + r`, so engines measured with one seed see the same; with a
    `secret` it gets hidden prompts of its own instead. After `deadline` (`time.monotonic()`) no further round starts
    once there are `min_rounds`. `progress` is called after each kept round. A failed request ends the measurement.

    Raises:
        EngineFailure: as for `run_round`.
    """
    rounds: list[Round] = []
    note, pruned = "", False
    for number in range(max_rounds + 1):
        mine = 1000 * seed + number
        key = None if secret is None else hashlib.sha256(secret + number.to_bytes(4)).digest()
        prompts = draw_prompts(source, traffic, mine, key)
        spec = traffic
        if number == 0 and warm_up_tokens is not None:
            spec = traffic.model_copy(update={"output_tokens": min(traffic.output_tokens, warm_up_tokens)})
        found = run_round(
            engine, spec, prompts, seed=mine, gates=gates, hidden=key is not None, stall_s=stall_s
        )  # fmt: skip
        if not found.ok or found.metric(metric) is None:
            rounds.append(found)
            failed = f"{found.summary.failed} of {len(found.rows)} requests failed: {'; '.join(found.errors)}"
            note = f"{metric} cannot be computed from this traffic" if found.ok else failed
            break
        if number == 0:
            continue
        rounds.append(found)
        if progress is not None:
            progress(found)
        last = [r.metric(metric) or 0.0 for r in rounds[-2:]]
        if len(rounds) == 1 and hopeless is not None and hopeless(last[0]):
            pruned = True
            break
        late = deadline is not None and time.monotonic() > deadline
        if len(rounds) >= min_rounds and (relative_spread(last) <= tolerance or late):
            break
    values = [v for r in rounds if (v := r.metric(metric)) is not None]
    if note or not values:
        return Measurement(metric=metric, rounds=tuple(rounds), value=None, spread=0.0, stable=False, note=note)
    stable = len(values) >= 2 and relative_spread(values[-2:]) <= tolerance
    if pruned:
        note = "far from the best after one round"
    elif not stable:
        note = f"the last two of {len(values)} rounds do not lie within {tolerance:.0%} of each other"
    return Measurement(
        metric=metric,
        rounds=tuple(rounds),
        value=statistics.median(values),
        spread=relative_spread(values),
        stable=stable,
        pruned=pruned,
        note=note,
    )


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

    def send_due(self, start: float, due: list[float] | None, concurrency: int) -> None:
        """Send what is due: an open loop by the clock, a closed one as far as others have ended."""
        while self.unsent:
            now = time.perf_counter() - start
            if (len(self.open) >= concurrency) if due is None else (due[self.sent] > now):
                return
            self._send(start, None if due is None else due[self.sent])

    def _send(self, start: float, due: float | None) -> None:
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
