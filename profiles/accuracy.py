"""Rung 1 of the accuracy ladder: whether the engine that was timed still says what the model says.

The evidence is the very tokens that were timed, scored by the clean reference: the regret (how much likelier the
reference's own choice was than the token emitted) and the share of tokens that are its choice. The engine's
teacher-forced distributions through its decode path are a witness beside it. Every limit is relative to the stock
engine's own distance at the workload's precision. Each check states the smallest worsening that it would have seen;
one that could not have seen anything near its limit is not passed but `cannot_evaluate`, and that blocks.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from scipy import stats as distributions

from profiles.engines.base import Engine, EngineFailure, OverlayCount
from profiles.prompts import PromptSource
from profiles.records import Record
from profiles.reference import Reference
from profiles.stats import detectable_difference
from profiles.workload import AccuracyGate, TrafficSpec

Status = Literal["pass", "fail", "cannot_evaluate"]

RESOLUTION = 3.0
"""A check counts when it would have seen, with the stated power, a worsening of this many times its limit."""
LEAST_DISTINCT = 0.7
"""Least share of different tokens in an output, relative to stock: less is a loop."""


class RequestScore(Record):
    """What the reference said of one timed request."""

    key: str
    """Equal for the requests of two engines that had the same prompt."""
    tokens: int
    regret_nats: float | None
    """Mean over tokens; None when there are none or one of them is not of the vocabulary."""
    top1: int
    """Tokens that are the reference's own choice."""
    distinct: float
    """Different tokens / tokens."""


class Sample(Record):
    """The scored requests of one engine."""

    requests: tuple[RequestScore, ...] = ()

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return sum(r.tokens for r in self.requests)


class Witness(Record):
    """The engine's own distributions against the reference's, by sequence."""

    kl_nats: tuple[float, ...] = ()
    agreement: tuple[float, ...] = ()
    problem: str = ""
    """Why there is no distance: NaN, wrong shape, no distribution."""
    unavailable: str = ""
    """Why it could not be asked for."""


class Distance(Record):
    """How far one engine lies from the reference; of the stock engine, what others are compared with."""

    sample: Sample
    witness: Witness | None = None


class Check(Record):
    """One question of the gate and its answer."""

    name: str
    status: Status
    value: float | None = None
    """How much worse than stock (or the share, the count), in the units of the name."""
    limit: float | None = None
    detectable: float | None = None
    """Smallest true worsening that this check shows with 80 % probability at 95 % confidence; None where unknown, as
    when every request equals stock's and nothing tells how much it could have varied."""
    detail: str


class AccuracyVerdict(Record):
    """The gate's answer: `fail` if a check failed, else `cannot_evaluate` if one could not be answered, else `pass`."""

    status: Status
    reason: str
    checks: tuple[Check, ...] = ()
    scored_tokens: int = 0
    stock_tokens: int = 0


def sample(reference: Reference, items: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> Sample:
    """Score timed requests, given as (key, prompt, emitted tokens). Raises EngineFailure."""
    scored = reference.score([(prompt, tokens) for _, prompt, tokens in items if tokens])
    scores = iter(scored)
    requests = []
    for key, _, tokens in items:
        score = next(scores) if tokens else None
        regret = None if score is None else float(score.regret.mean())
        requests.append(
            RequestScore(
                key=key,
                tokens=len(tokens),
                regret_nats=regret if regret is not None and math.isfinite(regret) else None,
                top1=0 if score is None else int(score.top1.sum()),
                distinct=len(set(tokens)) / len(tokens) if tokens else 0.0,
            )
        )
    return Sample(requests=tuple(requests))


def witness(
    reference: Reference, engine: Engine, source: PromptSource, traffic: TrafficSpec, *, least_sequences: int = 4,
    places: int = 16,
) -> Witness:  # fmt: skip
    """Teacher-force held-out text through the engine's decode path at the workload's batch; measure the distance."""
    prefix = min(traffic.input_tokens, 32)
    batch = traffic.concurrency
    texts = source.held_out(batch * math.ceil(least_sequences / batch), prefix + places)
    kl: list[float] = []
    agreement: list[float] = []
    with tempfile.TemporaryDirectory(prefix="roofloop-witness-") as folder:
        for start in range(0, len(texts), batch):
            file = Path(folder) / f"{start}.npy"
            try:
                engine.score(texts[start : start + batch], prefix, file)
            except EngineFailure as failure:
                return Witness(unavailable=str(failure))
            found = reference.witness_distance(texts[start : start + batch], prefix, file)
            if found.problem:
                return Witness(problem=found.problem)
            kl += found.kl_nats.tolist()
            agreement += found.agreement.tolist()
    return Witness(kl_nats=tuple(kl), agreement=tuple(agreement))


def judge(
    gate: AccuracyGate,
    engine: Distance,
    stock: Distance,
    *,
    counts: Sequence[OverlayCount] = (),
    required: Sequence[str] = (),
    strict: bool = False,
) -> AccuracyVerdict:
    """The gate: `engine` against the distance that the stock engine itself has from the reference.

    Args:
        gate: the limits.
        engine: the distance of the engine that was timed.
        stock: that of the stock engine; requests with equal keys are compared in pairs.
        counts: what the overlay counted during the gate.
        required: ids of the promoted candidates, each of which must have been called.
        strict: non-inferiority: the whole confidence interval must lie within the limit, else `cannot_evaluate`.
    """
    if not gate.enabled:
        return AccuracyVerdict(status="pass", reason="The workload switched the accuracy gate off.")
    checks = [_sound(engine.sample, "engine"), _sound(stock.sample, "stock")]
    if all(c.status == "pass" for c in checks):
        checks += [
            _regret(gate, engine.sample, stock.sample, strict),
            _top1(gate, engine.sample, stock.sample, strict),
            _repetition(engine.sample, stock.sample),
        ]
    checks.append(_kl(gate, engine.witness, stock.witness, strict))
    checks += [_called(candidate, counts) for candidate in required]
    for status in ("fail", "cannot_evaluate"):
        wrong = [c for c in checks if c.status == status]
        if wrong:
            break
    else:
        status = "pass"
    seen = next((c.detectable for c in checks if c.name == "top1_share_drop"), None)
    power = "" if seen is None else f" A drop of {100 * seen:.2f} points in top-1 agreement would have been seen."
    return AccuracyVerdict(
        status=status,
        reason=" ".join(c.detail for c in wrong) if wrong else f"Within all limits.{power}",
        checks=tuple(checks),
        scored_tokens=engine.sample.tokens,
        stock_tokens=stock.sample.tokens,
    )


def _sound(found: Sample, whose: str) -> Check:
    name = f"{whose}_tokens"
    bad: Status = "fail" if whose == "engine" else "cannot_evaluate"
    if not found.requests:
        return Check(name=name, status="cannot_evaluate", detail=f"No timed request of the {whose} was scored.")
    empty = sum(r.tokens == 0 for r in found.requests)
    broken = sum(r.tokens > 0 and r.regret_nats is None for r in found.requests)
    if empty or broken:
        detail = f"{whose}: {empty} empty outputs, {broken} with tokens that the model does not have or NaN."
        return Check(name=name, status=bad, value=empty + broken, limit=0, detail=detail)
    return Check(name=name, status="pass", value=found.tokens, detail=f"{found.tokens} tokens scored.")


def _regret(gate: AccuracyGate, engine: Sample, stock: Sample, strict: bool) -> Check:
    worse, error = _worsening(
        {r.key: r.regret_nats or 0.0 for r in engine.requests}, {r.key: r.regret_nats or 0.0 for r in stock.requests}
    )
    return _within(
        "regret_increase_nats", "mean regret", worse, error, limit=gate.max_regret_increase_nats, strict=strict
    )


def _top1(gate: AccuracyGate, engine: Sample, stock: Sample, strict: bool) -> Check:
    own = sum(r.top1 for r in stock.requests) / stock.tokens
    if own == 0:
        detail = "The stock engine itself never emits the reference's choice: there is nothing to compare with."
        return Check(name="top1_share_drop", status="cannot_evaluate", detail=detail)
    gain, error = _worsening(
        {r.key: r.top1 / r.tokens for r in engine.requests}, {r.key: r.top1 / r.tokens for r in stock.requests}
    )
    if error is not None:  # equal outputs differ by nothing, yet n tokens cannot show a drop of less than one in n
        error = max(error, 1 / engine.tokens)
    limit = (1 - gate.min_top1_agreement_ratio) * own
    return _within("top1_share_drop", "top-1 agreement", -gain, error, limit=limit, strict=strict)


def _repetition(engine: Sample, stock: Sample) -> Check:
    ours = float(np.mean([r.distinct for r in engine.requests]))
    theirs = float(np.mean([r.distinct for r in stock.requests]))
    ratio = ours / theirs
    detail = f"Outputs hold {ratio:.2f} times as many different tokens as stock's."
    status: Status = "pass" if ratio >= LEAST_DISTINCT else "fail"
    return Check(name="distinct_ratio", status=status, value=ratio, limit=LEAST_DISTINCT, detail=detail)


def _kl(gate: AccuracyGate, engine: Witness | None, stock: Witness | None, strict: bool) -> Check:
    name = "kl_increase_nats"
    if engine is not None and engine.problem:
        return Check(name=name, status="fail", detail=f"The engine's distributions are broken: {engine.problem}.")
    for whose, found in (("engine", engine), ("stock engine", stock)):
        why = "was not asked" if found is None else found.problem or found.unavailable
        if why:
            detail = f"The KL divergence could not be evaluated: the {whose} {why}."
            return Check(name=name, status="cannot_evaluate", detail=detail)
    assert engine is not None
    assert stock is not None
    # both were given the same texts in the same order
    worse, error = _worsening(
        {str(i): v for i, v in enumerate(engine.kl_nats)}, {str(i): v for i, v in enumerate(stock.kl_nats)}
    )
    return _within(name, "mean KL divergence", worse, error, limit=gate.max_kl_increase_nats, strict=strict)


def _called(candidate: str, counts: Sequence[OverlayCount]) -> Check:
    taken = sum(c.taken for c in counts if c.candidate == candidate)
    detail = f"Kernel {candidate[:12]} was called {taken} times during the gate."
    return Check(
        name=f"calls:{candidate[:12]}", status="pass" if taken else "fail", value=taken, limit=1, detail=detail
    )  # fmt: skip


def _worsening(engine: dict[str, float], stock: dict[str, float]) -> tuple[float, float | None]:
    """Mean(engine) − mean(stock) by request, and its standard error: paired where the keys are the same, else Welch's.
    Requests, not tokens, are the unit: what follows a divergence within a request depends on it.
    """
    if engine.keys() == stock.keys():
        values = np.array([engine[k] - stock[k] for k in engine])
        return float(values.mean()), float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else None
    a, b = np.array(list(engine.values())), np.array(list(stock.values()))
    error = math.sqrt(a.var(ddof=1) / a.size + b.var(ddof=1) / b.size) if min(a.size, b.size) > 1 else None
    return float(a.mean() - b.mean()), error


def _within(name: str, what: str, worse: float, error: float | None, *, limit: float, strict: bool) -> Check:
    detectable = None if error is None else detectable_difference(error)
    said = f"{what[0].upper()}{what[1:]} is {worse:.4g} worse than stock's (limit {limit:.4g})"
    status: Status = "cannot_evaluate"
    if worse > limit:
        status, detail = "fail", f"{said}."
    elif error is None or detectable is None:
        detail = f"{said}, from a single request: unknown."
    elif error == 0 and worse == 0:
        status, detectable, detail = "pass", None, f"{what[0].upper()}{what[1:]} is stock's in every request."
    elif strict and (upper := worse + float(distributions.norm.ppf(0.95)) * error) > limit:
        detail = f"{said}, but may be {upper:.4g} worse: too few tokens to resolve it."
    elif detectable > RESOLUTION * max(limit, 1e-9):
        detail = f"{said}, but only {detectable:.4g} would have been seen: too few tokens to resolve it."
    else:
        status, detail = "pass", f"{said}; {detectable:.4g} would have been seen."
    return Check(name=name, status=status, value=worse, limit=limit, detectable=detectable, detail=detail)
