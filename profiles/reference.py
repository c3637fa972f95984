"""The clean reference: a process of its own that holds the model in float32 and nothing of any candidate.

It says how likely each token that an engine emitted was, and how likely the best one would have been. It runs plain
transformers from the model folder, without settings, overlay or compiler, and is stopped (SIGSTOP) whenever it is not
asked something, so that it takes no time from an engine that is being measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profiles.engines.base import EngineFailure
from profiles.engines.child import Channel, Child, environment_for, spawn

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class TokenScores:
    """What the reference says of one request's emitted tokens; NaN from the first id that the model does not have."""

    logprob: np.ndarray
    """Log-probability of each emitted token given all before it, nats, float64 of shape [tokens]."""
    best: np.ndarray
    """The same for the reference's own choice at that place."""
    top1: np.ndarray
    """Whether the emitted token is that choice, bool of shape [tokens]."""

    @property
    def regret(self) -> np.ndarray:
        """Best − logprob, nats, never negative."""
        return self.best - self.logprob


@dataclass(frozen=True)
class WitnessDistance:
    """How far an engine's teacher-forced distributions lie from the reference's."""

    kl_nats: np.ndarray
    """KL(reference ‖ engine) averaged over the places of a sequence, float64 of shape [sequences]."""
    agreement: np.ndarray
    """Share of places with the same first choice, float64 of shape [sequences]."""
    problem: str
    """Why it is no distribution at all (wrong shape, NaN, does not sum to 1); empty when it is one."""


class Reference:
    """The parent's side. `start` → any number of `score` and `witness_distance` → `stop`; a context manager.

    Args:
        model_dir: folder with config.json and model.safetensors.
        children: folder for the pid file by which a leftover is found.
        log: file for what it prints.
        threads: 1 or 2.
        timeout_s: longest answer.
    """

    def __init__(self, model_dir: Path, *, children: Path, log: Path, threads: int = 2, timeout_s: float = 300) -> None:
        self._start = {"model": str(Path(model_dir).resolve()), "threads": min(max(threads, 1), 2)}
        self._children, self._log, self._timeout_s = children, log, timeout_s
        self._child: Child | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Load the model. Raises EngineFailure."""
        with self._lock:
            environment = environment_for(self._start["threads"], "passive")  # type: ignore[arg-type]
            self._child = spawn(
                "profiles.reference:serve",
                children=self._children,
                log=self._log,
                environment=environment,
                name="reference",
            )
            self._ask(self._start)

    def score(self, items: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TokenScores]:
        """Score (prompt, emitted tokens) pairs; prompts must not be empty.

        Raises:
            EngineFailure: the process is gone or does not answer.
        """
        if not items:
            return []
        with self._lock:
            reply = self._ask({"op": "score", "items": [[list(p), list(t)] for p, t in items]})
        return [
            TokenScores(np.array(r["logprob"], float), np.array(r["best"], float), np.array(r["top1"], bool))
            for r in reply["scores"]
        ]

    def witness_distance(self, sequences: Sequence[Sequence[int]], prefix: int, file: Path) -> WitnessDistance:
        """Compare what `Engine.score` wrote to `file` for the same arguments. Raises EngineFailure."""
        with self._lock:
            message = {"op": "witness", "sequences": [list(s) for s in sequences], "prefix": prefix, "file": str(file)}
            reply = self._ask(message)
        return WitnessDistance(np.array(reply["kl"], float), np.array(reply["agreement"], float), reply["problem"])

    def stop(self) -> None:
        """End the process; never raises."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def __enter__(self) -> Reference:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id while it is up."""
        return None if self._child is None else self._child.pid

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            raise EngineFailure("start", "the reference process has not been started")
        with _awake(self._child):
            return self._child.ask(message, self._timeout_s)


@contextlib.contextmanager
def _awake(child: Child) -> Iterator[None]:
    """Let the child run inside the block, and stop it after."""
    _signal(child.pid, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(child.pid, signal.SIGSTOP)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


# --- in the child ------------------------------------------------------------------------------------------------


def serve(channel: Channel) -> None:
    """The child: load, then answer until the parent is gone."""
    first = channel.receive()
    if first is None:
        return
    if not Path(first["model"], "config.json").is_file():
        channel.send({"failure": "start", "detail": f"the reference cannot load the model: no {first['model']}"})
        return
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(first["threads"])
    torch.set_grad_enabled(False)
    try:
        model = AutoModelForCausalLM.from_pretrained(first["model"], dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        channel.send({"failure": "start", "detail": f"the reference cannot load the model: {error}"})
        return
    channel.send({"ok": True})
    while (message := channel.receive()) is not None and message.get("op") != "stop":
        try:
            if message["op"] == "score":
                channel.send({"scores": _score(model, message["items"])})
            else:
                channel.send(_witness(model, message["sequences"], message["prefix"], message["file"]))
        except (MemoryError, RuntimeError, ValueError, IndexError) as error:
            kind = "out_of_memory" if "memory" in str(error).lower() else "crash"
            channel.send({"failure": kind, "detail": f"the reference failed: {error}"})


def _score(model: Any, items: list[list[list[int]]]) -> list[dict[str, list]]:
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    order = sorted(range(len(items)), key=lambda i: len(items[i][0]) + len(items[i][1]))
    found: list[dict[str, list]] = [{} for _ in items]
    while order:
        longest = len(items[order[-1]][0]) + len(items[order[-1]][1])
        batch = [order.pop() for _ in range(min(max(BATCH_TOKENS // longest, 1), len(order)))]
        # Padding on the right cannot change what stands left of it; ids that the model lacks are masked out below
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            sequence = [t if 0 <= t < vocabulary else 0 for t in (*items[i][0], *items[i][1])]
            ids[row, : len(sequence)] = torch.tensor(sequence)
        start = min(len(items[i][0]) for i in batch) - 1
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=longest - start).logits
        for row, i in enumerate(batch):
            prompt, tokens = items[i]
            first = len(prompt) - 1 - start
            logs = torch.log_softmax(logits[row, first : first + len(tokens)], -1)
            best, choice = logs.max(-1)
            emitted = ids[row, len(prompt) : len(prompt) + len(tokens)]
            own = logs.gather(-1, emitted[:, None])[:, 0]
            top1 = choice == emitted
            bad = next((n for n, t in enumerate(tokens) if not 0 <= t < vocabulary), len(tokens))
            own[bad:] = float("nan")
            top1[bad:] = False
            found[i] = {"logprob": own.tolist(), "best": best.tolist(), "top1": top1.tolist()}
    return found


def _witness(model: Any, sequences: list[list[int]], prefix: int, file: str) -> dict[str, Any]:
    import torch

    places = len(sequences[0]) - prefix
    nothing: dict[str, Any] = {"kl": [], "agreement": []}
    try:
        theirs = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        return nothing | {"problem": f"the engine's log-probabilities cannot be read: {error}"}
    shape = (len(sequences), places, model.config.get_text_config().vocab_size)
    if theirs.shape != shape or theirs.dtype != np.float32:
        return nothing | {"problem": f"log-probabilities are {theirs.dtype}{theirs.shape}, not float32{shape}"}
    if np.isnan(theirs).any():
        return nothing | {"problem": f"{int(np.isnan(theirs).sum())} log-probabilities are NaN"}
    kl, agreement = [], []
    for sequence, mine in zip(sequences, theirs, strict=True):
        ids = torch.tensor([sequence])
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=places + 1).logits[0, :-1]
        ours, engine = torch.log_softmax(logits.double(), -1), torch.from_numpy(mine).double()
        if (torch.logsumexp(engine, -1).abs() > 0.02).any():
            return nothing | {"problem": "probabilities do not sum to 1"}
        # a probability of 0 is a distance without end; JSON and means want a number
        engine = engine.clamp(min=-1e4)
        kl.append(float((ours.exp() * (ours - engine)).sum(-1).mean()))
        agreement.append(float((ours.argmax(-1) == engine.argmax(-1)).double().mean()))
    return {"kl": kl, "agreement": agreement, "problem": ""}
