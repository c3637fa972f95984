"""What the ruler says, and the one place that decides what an agent may see of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["valid", "incorrect", "void", "build_failed", "crashed", "timeout", "out_of_memory", "unresolved"]
Mode = Literal["screen", "confirm"]

LAWS: Mapping[str, str] = {
    "protocol": "the worker did something other than answer each call",
    "memory": "bytes outside the output were written, or an output was left unwritten",
    "physics": "faster than the floor that the machine's ceilings set",
    "clock": "a time was not a positive finite number",
    "batch": "one input per handshake took much longer than the batches did",
    "constants": "a constant input was changed or its packing is not repeatable",
    "confinement": "the confinement that was asked for is not to be had on this machine",
}
"""What `Verdict.law` can name, for status `void`."""


@dataclass(frozen=True)
class Interval:
    """A speed-up (baseline time over candidate time): estimate, confidence bounds, number of pairs."""

    estimate: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class ShapeResult:
    """What one visible shape came to."""

    shape: Mapping[str, int]
    speedup: Interval
    claim: float
    """The least of the ratios of medians, lower quartiles, trimmed totals and the paired median."""
    baseline_s: float
    """Median seconds per call of the baseline, the ruler's own cost taken off."""
    candidate_s: float
    floor_s: float | None
    floor_fraction: float | None
    """Floor over candidate's time: 1.0 is at the roofline."""
    overhead_fraction: float
    """Cost of a handshake over the time measured in one, before it was taken off."""
    calls_per_handshake: int
    baseline: str
    """Which baseline was the fastest here: `eager`, `vendor`, `compile`, `candidate`."""
    faster: bool
    """The interval lies above the threshold."""


@dataclass(frozen=True)
class Verdict:
    """The ruler's verdict on one candidate; immutable, with its content's hash as `id`.

    Headline figures (`speedup`, `claim`, `medians`, `floor_fraction`) are those of the first visible shape, the one
    that counts most; `per_shape` has all that were timed. `confinement` has `level` and `lacking`; `provenance` has
    `verdict` (`new kernel`, `vendor`, `unknown`) and `evidence`; `cases` counts cases and failures, visible and
    hidden apart; `noise` describes the machine while it was measured; `raw` has every time in seconds.
    """

    status: Status
    mode: Mode
    problem: str
    problem_id: str
    candidate_id: str
    reason: str = ""
    law: str | None = None
    speedup: Interval | None = None
    claim: float | None = None
    cache_state: str = "warm"
    """`cold`: the constants were in no cache, for either side."""
    threshold: float | None = None
    """What the lower bound must exceed; from A/A measurements on this machine."""
    faster: bool | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    floor_fraction: float | None = None
    per_shape: tuple[ShapeResult, ...] = ()
    cases: Mapping[str, Any] = field(default_factory=dict)
    first_error: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    confinement: Mapping[str, Any] = field(default_factory=dict)
    baselines: Mapping[str, str] = field(default_factory=dict)
    """Which baselines were tried at which shape and their quick times, or why one was not."""
    prepare: Mapping[str, float] = field(default_factory=dict)
    """Seconds and bytes of the candidate's untimed `prepare`, when it has one."""
    versions: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """SHA-256 of the verdict as canonical JSON."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain JSON data, its `id` included."""
        return {**dataclasses.asdict(self), "id": self.id}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Verdict:
        """Read back what `to_json` gave.

        Raises:
            ValueError: the data's `id` is not the hash of its content (it was changed), or a field is unknown.
        """
        given = dict(data)
        claimed = given.pop("id", None)
        try:
            if given.get("speedup") is not None:
                given["speedup"] = Interval(**given["speedup"])
            given["per_shape"] = tuple(
                ShapeResult(**{**row, "speedup": Interval(**row["speedup"])}) for row in given.get("per_shape", ())
            )
            verdict = Verdict(**given)
        except TypeError as error:
            raise ValueError(f"not a verdict: {error}") from error
        if claimed is not None and claimed != verdict.id:
            raise ValueError("the verdict does not match its id: its content was changed after it was written")
        return verdict

    def _canonical(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)


def visible(verdict: Verdict) -> dict[str, Any]:
    """What an agent may see: figures and errors of visible shapes; hidden cases only as counts."""
    full = verdict.to_json()
    keep = (
        "id", "status", "mode", "problem", "candidate_id", "reason", "law", "speedup", "claim", "threshold", "faster",
        "medians", "floor_fraction", "per_shape", "first_error", "provenance", "prepare", "duration_s",
    )  # fmt: skip
    shown = {key: full[key] for key in keep}
    shown["cases"] = {
        k: v for k, v in full["cases"].items() if k in ("visible", "visible_failed", "hidden", "hidden_failed")
    }
    return shown
