"""What every engine is to the rest: settings in, tokens out, one child process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from kernels.identity import content_hash
from kernels.ruler.spec import Candidate, Problem
from profiles.records import Record

Knob = str | int | float | bool


class Settings(Record):
    """One point of an engine's knobs, as asked for. Knobs left out stay at the engine's defaults."""

    engine: str
    knobs: dict[str, Knob] = {}


class Resolved(Record):
    """What the engine made of the settings: its identity is what counts."""

    engine: str
    version: str
    """Version of the engine and of what decides its speed: `transformers 5.24.0, torch 2.13.0`."""
    config: dict[str, Knob | None]
    """Every knob with the value in force."""

    @property
    def hash(self) -> str:
        """First 16 hex digits of the hash of engine, version and config."""
        return content_hash(self.model_dump(mode="json"))[:16]


@dataclasses.dataclass(frozen=True)
class Promoted:
    """A candidate that the ruler approved, with the problem and the shapes it was judged for."""

    problem: Problem
    candidate: Candidate
    verdict_id: str
    judged: tuple[dict[str, int], ...] = ()
    """Shapes that the verdict covers; empty: any shape within the range of the problem's visible and hidden shapes."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """What would be deployed: settings and promoted candidates."""

    settings: Settings
    kernels: tuple[Promoted, ...] = ()

    @property
    def id(self) -> str:
        """First 16 hex digits of the hash of the settings and of the candidates in order."""
        parts = [self.settings.model_dump(mode="json"), [(k.problem.id, k.candidate.id) for k in self.kernels]]
        return content_hash(parts)[:16]


class KnobSpec(Record):
    """One knob that the settings search may turn."""

    name: str
    choices: tuple[Knob, ...]
    """Choices on this machine, the default among them."""
    default: Knob
    help: str
    interacts_with: tuple[str, ...] = ()
    """Operators whose kernels change what this knob is worth: `linear`, `attention`."""


class GenerateRequest(Record):
    """One request. Greedy; the end-of-sequence token is ignored when `exact`."""

    id: str
    prompt: tuple[int, ...]
    """Token ids."""
    max_tokens: int
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """What arrived from the engine. The parent stamps it; nothing in it is a time."""

    request_id: str
    tokens: tuple[int, ...]
    """Token ids of this chunk, usually one."""
    arrived_s: float
    """`time.perf_counter()` of the parent when the chunk was in its hands."""
    done: bool
    error: str | None = None


class EngineFailure(Exception):
    """The engine could not do it. `kind` says how, and the settings search learns from it."""

    def __init__(self, kind: Literal["crash", "out_of_memory", "hang", "refused", "start"], detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class OverlayCount(Record):
    """How often one promoted kernel was taken, and how often its site fell back."""

    problem: str
    candidate: str
    sites: int
    taken: int
    fell_back: int
    reasons: dict[str, int] = Field(default_factory=dict)
    """Fall-backs by reason: `shape`, `dtype`, `device`, `grad`, `layout`."""
    prepare_s: float = 0.0
    prepared_bytes: int = 0


class Engine(Protocol):
    """An engine in a child process (or a server), spoken to by the parent.

    Lifetime: `start` → any number of `submit`/`events`, `score`, `profile`, `counts` → `stop`. A context manager that
    stops on exit. A child never outlives its parent: PDEATHSIG, its own session, killed as a group.
    """

    def start(self) -> Resolved:
        """Bring the engine up and warm it. Raises EngineFailure."""

    def submit(self, request: GenerateRequest) -> None:
        """Hand over one request; returns at once. Raises EngineFailure when the engine is gone."""

    def events(self, timeout_s: float) -> Iterator[TokenEvent]:
        """Yield what has arrived, waiting up to `timeout_s` for the first.

        Raises:
            EngineFailure: nothing came (`hang`) or the engine is gone.
        """

    def score(self, sequences: Sequence[Sequence[int]], prefix: int, out: Path) -> None:
        """Teacher-force the sequences (equal lengths) through the *decode* path at their batch size.

        Writes float32 log-probabilities to `out` as .npy of shape [sequences, length − prefix, vocabulary]: position i
        holds the distribution for token `prefix + i` given all tokens before it. A witness, no more.
        """

    def profile(self, requests: Sequence[GenerateRequest], out: Path) -> None:
        """Serve the requests under the profiler; writes the raw operator table to `out` (see `profiles.operators`)."""

    def counts(self) -> tuple[OverlayCount, ...]:
        """Calls taken and fallen back per promoted kernel since the start or the last `reset_counts`."""

    def reset_counts(self) -> None:
        """Set all counts to zero."""

    def peak_memory_bytes(self) -> int:
        """Highest resident set of the child so far, read by the parent from /proc."""

    def stop(self) -> None:
        """End the child and everything it started; never raises."""
