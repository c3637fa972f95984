"""Promote or reject: the one place where a comparison becomes a decision, with every reason in plain words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from kb.records import EndToEnd, Provenance
from kernels.identity import content_hash
from profiles.engines.base import Engine
from profiles.prompts import PromptSource
from profiles.records import Record
from profiles.reference import Reference
from profiles.workload import Workload
from tasks.evaluate import Comparison, compare

AMDAHL_MARGIN = 0.02
"""What the profile's time shares may be wrong by, as a fraction of the whole."""
HIDDEN_ALPHA = 0.02


class Decision(Record):
    """What becomes of the candidate."""

    decision: Literal["promoted", "rejected"]
    reason: str
    """The first and weightiest reason."""
    reasons: tuple[str, ...] = ()
    """All of them."""


def decide(
    comparison: Comparison, *, further: Sequence[str] = (), amdahl_margin: float = AMDAHL_MARGIN
) -> Decision:  # fmt: skip
    """Decide on a comparison.

    Args:
        comparison: what was measured.
        further: reasons against it from elsewhere, such as `resource_check`.
        amdahl_margin: how far above Amdahl's limit the interval's lower end may lie.
    """
    found = [*_failures(comparison), *_impossible(comparison, amdahl_margin), *_hidden(comparison)]
    found += [*_no_gain(comparison), *_accuracy(comparison), *_gates(comparison), *further]
    if found:
        return Decision(decision="rejected", reason=found[0], reasons=tuple(found))
    interval = comparison.interval
    assert interval is not None  # else _no_gain had spoken
    reason = (
        f"{comparison.metric} is {interval.estimate:.3f}× as good ({interval.low:.3f} to {interval.high:.3f}, "
        f"{interval.n} pairs), on hidden prompts too. {comparison.accuracy.reason if comparison.accuracy else ''}"
    )
    return Decision(decision="promoted", reason=reason.strip(), reasons=(reason.strip(),))


def resource_check(
    before_ms: Mapping[str, float],
    after_ms: Mapping[str, float],
    *,
    replaced: Sequence[str],
    noise_floor: float = 0.10,
    least_ms: float = 0.1,
    before_memory_bytes: int | None = None,
    after_memory_bytes: int | None = None,
    allowed_memory_bytes: int = 256 << 20,
) -> tuple[str, ...]:
    """What the candidate cost its neighbours.

    Args:
        before_ms: time per operator over the same traffic without the candidate.
        after_ms: the same with it; an operator that is gone may be missing.
        replaced: operators that the candidate takes the place of.
        noise_floor: growth that an operator shows against itself from profile to profile, as a fraction.
        least_ms: growth below this is never a reason.
        before_memory_bytes: peak resident memory without the candidate; None: not compared.
        after_memory_bytes: the same with it.
        allowed_memory_bytes: growth that is allowed, packed weights included.

    Returns:
        A reason for each neighbour that became slower, and one for memory; empty where nothing did.
    """
    reasons = []
    for name, before in before_ms.items():
        after = after_ms.get(name, 0.0)
        grown = after - before
        if name not in replaced and grown > least_ms and grown > noise_floor * before:
            reasons.append(
                f"{name}, which the candidate does not touch, became slower: {before:.2f} to {after:.2f} ms "
                f"(noise {noise_floor:.0%})."
            )
    if before_memory_bytes is not None and after_memory_bytes is not None:
        more = after_memory_bytes - before_memory_bytes
        if more > allowed_memory_bytes:
            reasons.append(f"It takes {more / 2**20:.0f} MiB more memory; {allowed_memory_bytes / 2**20:.0f} allowed.")
    return tuple(reasons)


def confirm_final(
    open_stock: Callable[[], Engine],
    open_final: Callable[[], Engine],
    workload: Workload,
    source: PromptSource,
    reference: Reference,
    *,
    required: Sequence[str] = (),
    strict: bool = True,
    **options: Any,
) -> tuple[Comparison, Decision]:
    """Measure the final stack once more, in fresh engines, against stock: the headline.

    Takes the options of `compare`. Accuracy is judged by non-inferiority, against the stock engine of this comparison.
    """
    options.setdefault("about", {"purpose": "final"})
    options.setdefault("score_requests", 32)
    comparison = compare(
        open_stock, open_final, workload, source, reference, required=required, strict=strict, always_gate=True,
        **options,
    )  # fmt: skip
    return comparison, decide(comparison)


def end_to_end(
    comparison: Comparison,
    decision: Decision,
    *,
    run_id: str,
    purpose: Literal["settings", "promotion", "final"],
    stack_id: str,
    against_stack_id: str,
    provenance: Provenance,
    idea_id: str | None = None,
    raw_file: str = "",
    at: str | None = None,
) -> EndToEnd:
    """The comparison as the knowledge base keeps it. `raw_file` is relative to the run's folder."""
    interval = comparison.interval
    at = at or datetime.now(UTC).isoformat(timespec="seconds")
    return EndToEnd(
        id=content_hash([run_id, purpose, stack_id, against_stack_id, at])[:16],
        run_id=run_id,
        purpose=purpose,
        idea_id=idea_id,
        stack_id=stack_id,
        against_stack_id=against_stack_id,
        metric=comparison.metric,
        value=comparison.b_value,
        against_value=comparison.a_value,
        ratio=None if interval is None else interval.estimate,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        rounds=len(comparison.pairs),
        visible_ratio=None if comparison.visible is None else comparison.visible.estimate,
        hidden_ratio=None if comparison.hidden is None else comparison.hidden.estimate,
        accuracy={} if comparison.accuracy is None else comparison.accuracy.model_dump(mode="json"),
        decision=decision.decision,
        reason=decision.reason,
        raw_file=raw_file,
        provenance=provenance,
        at=at,
    )


def _failures(found: Comparison) -> list[str]:
    return [f"The engine with the change failed: {found.failure}"] if found.failure else []


def _impossible(found: Comparison, margin: float) -> list[str]:
    limit, interval = found.amdahl_limit, found.interval
    if limit is None or interval is None or interval.low <= limit * (1 + margin):
        return []
    return [
        f"Impossible: {interval.estimate:.3f}× (at least {interval.low:.3f}) end to end, where the replaced operators' "
        f"share of the time allows at most {limit:.3f}× (Amdahl). Something else than the kernel changed."
    ]


def _hidden(found: Comparison) -> list[str]:
    if found.interval is None or found.failure:
        return []
    if found.hidden is None or found.visible is None:
        return ["Whether the gain holds on hidden prompts is unknown: too few pairs of one kind."]
    seen = f"{found.visible.estimate:.3f}× on visible prompts, {found.hidden.estimate:.3f}× on hidden ones"
    if found.hidden_difference < 0 and found.hidden_p < HIDDEN_ALPHA:
        return [f"The gain vanishes on hidden prompts: {seen}."]
    if found.verdict == "above" and found.hidden.estimate <= found.threshold:
        return [f"There is no gain on hidden prompts: {seen}."]
    return []


def _no_gain(found: Comparison) -> list[str]:
    if found.failure or found.verdict == "above":
        return []
    interval = found.interval
    if interval is None:
        return [f"Not decided: too few pairs for an interval. {found.note}".strip()]
    said = f"{interval.estimate:.3f}× ({interval.low:.3f} to {interval.high:.3f})"
    need = f"{found.threshold:.3f}×"
    if found.verdict == "below":
        return [f"No gain: {said} lies below the {need} that counts."]
    noise = f"one engine against itself varies by {100 * found.a_spread:.1f} % a round here"
    return [f"Not decided after {interval.n} pairs: {said} does not lie above {need}; {noise}. {found.note}".strip()]


def _accuracy(found: Comparison) -> list[str]:
    if found.accuracy is None:
        # where there is no gain it was not looked at, and that is reason enough
        return ["Accuracy was not evaluated."] if found.verdict == "above" else []
    if found.accuracy.status == "pass":
        return []
    word = "fails" if found.accuracy.status == "fail" else "could not be evaluated"
    return [f"Accuracy {word}: {found.accuracy.reason}"]


def _gates(found: Comparison) -> list[str]:
    return [
        f"{g.name} is {g.value:.3g}, over the limit of {g.limit:.3g}."
        if g.value is not None
        else f"{g.name} could not be evaluated."
        for g in found.gates
        if g.status != "pass"
    ]
