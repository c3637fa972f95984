"""The `transformers` engine as its parent sees it: one or several children behind one adapter."""

from __future__ import annotations

import dataclasses
import os
import queue
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from kernels.errors import InputError
from profiles.engines import child as children_of
from profiles.engines import transformers_knobs as knobs_of
from profiles.engines.base import EngineFailure, GenerateRequest, OverlayCount, Promoted, Resolved, Stack, TokenEvent
from profiles.engines.child import Child, Message
from profiles.models import context_length, read_config
from profiles.workload import Workload

ENTRY = "profiles.engines.transformers_worker:main"


class TransformersEngine:
    """See `profiles.engines.base.Engine`. Made by `profiles.engines.open_engine`."""

    def __init__(
        self,
        workload: Workload,
        model_dir: Path,
        stack: Stack,
        *,
        children: Path,
        builds: Path,
        log: Path,
        memory_bytes: int | None = None,
        confinement: Literal["none", "process", "sandbox"] = "sandbox",
        start_timeout_s: float = 300.0,
        reply_timeout_s: float = 600.0,
    ) -> None:
        traffic = workload.traffic
        self._knobs = knobs_of.resolve(stack.settings.knobs, workload, model_dir)
        self._longest = check_context(workload, model_dir)
        self._context = context_length(model_dir)
        self._vocabulary = int(read_config(model_dir).get("vocab_size") or 0)
        self._warm_tokens = traffic.input_tokens
        self._dtype = workload.model.dtype
        self._model_dir, self._stack = model_dir.resolve(), stack
        self._children_dir, self._builds, self._log = children.resolve(), builds.resolve(), log
        self._memory_bytes = memory_bytes or psutil.virtual_memory().total
        self._asked_confinement = confinement
        self._start_timeout_s, self._reply_timeout_s = start_timeout_s, reply_timeout_s
        self._children: list[Child] = []
        self._arrived: queue.SimpleQueue[tuple[int, float, Message | None]] = queue.SimpleQueue()
        self._replies: list[queue.SimpleQueue[Message | None]] = []
        self._open: dict[str, int] = {}
        self._scratch: Path | None = None
        self.confinement = ""
        """Level that the children reached; empty before the start."""
        self.lacking: tuple[str, ...] = ()
        """Mechanisms that this machine did not give them."""

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the replicas."""
        return tuple(child.pid for child in self._children)

    def start(self) -> Resolved:
        """Bring the replicas up, warm. Raises EngineFailure: `refused`, `start`, `out_of_memory`, `crash`, `hang`."""
        knobs_of.refuse(self._knobs, len(self._stack.kernels))
        self._builds.mkdir(parents=True, exist_ok=True)
        self._children_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._build_kernels()
            ready = self._start_children()
        except BaseException:
            self.stop()
            raise
        self.confinement, self.lacking = ready[0]["confinement"], tuple(ready[0]["lacking"])
        configs = [message["ready"] for message in ready]
        if any(config != configs[0] for config in configs):
            self.stop()
            raise EngineFailure("start", f"the replicas resolved the same settings differently: {configs}")
        self._replies = [queue.SimpleQueue() for _ in self._children]
        for index in range(len(self._children)):
            threading.Thread(target=self._read, args=(index,), name=f"from-engine-{index}", daemon=True).start()
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "torch"))
        return Resolved(engine="transformers", version=versions, config={**configs[0], "replicas": len(configs)})

    def submit(self, request: GenerateRequest) -> None:
        """Hand a request to the replica with the fewest open ones. Raises EngineFailure (`refused`, or it is gone)."""
        self._check_request(request)
        loads = Counter(self._open.values())
        index = min(range(len(self._children)), key=lambda i: loads[i])
        self._open[request.id] = index
        self._children[index].send({"op": "submit", **_as_json(request)})

    def events(self, timeout_s: float) -> Iterator[TokenEvent]:
        """Yield what has arrived; see `Engine.events`. With nothing in flight it returns empty-handed."""
        wait = timeout_s
        while True:
            try:
                index, arrived_s, message = self._arrived.get(timeout=wait) if wait > 0 else self._arrived.get_nowait()
            except queue.Empty:
                if wait > 0 and self._open:
                    waiting = f"{len(self._open)} requests are waiting"
                    raise EngineFailure("hang", f"nothing came for {timeout_s:g} s; {waiting}") from None
                return
            if message is None:
                raise self._children[index].failure()
            children_of.raise_failure(message)
            for request_id, tokens, done in _rows(message):
                if request_id not in self._open:
                    raise EngineFailure("crash", f"the engine speaks of a request that is not open: {request_id!r}")
                if done:
                    del self._open[request_id]
                yield TokenEvent(request_id, tokens, arrived_s, done)
            wait = 0.0

    def score(self, sequences: Sequence[Sequence[int]], prefix: int, out: Path) -> None:
        """See `Engine.score`. Raises InputError when the lengths differ or leave nothing to score."""
        lengths = {len(sequence) for sequence in sequences}
        if len(lengths) != 1 or not 0 < prefix < next(iter(lengths)):
            raise InputError("Sequences to score must have one length, longer than the prefix.", remedy="Cut them.")
        message = {"op": "score", "sequences": [list(s) for s in sequences], "prefix": prefix}
        self._to_file(message, out, ".npy")

    def profile(self, requests: Sequence[GenerateRequest], out: Path) -> None:
        """Serve the requests in the first replica under the profiler; writes the raw operator table to `out`."""
        for request in requests:
            self._check_request(request)
        self._to_file({"op": "profile", "requests": [_as_json(request) for request in requests]}, out, ".json")

    def counts(self) -> tuple[OverlayCount, ...]:
        """Counts summed over the replicas."""
        total: list[OverlayCount] = []
        for reply in self._ask_all({"op": "counts"}):
            found = [OverlayCount(**item) for item in reply["counts"]]
            total = [_add(a, b) for a, b in zip(total, found, strict=True)] if total else found
        return tuple(total)

    def reset_counts(self) -> None:
        """Set the counts of all replicas to zero."""
        self._ask_all({"op": "reset_counts"})

    def peak_memory_bytes(self) -> int:
        """Sum over the replicas of their highest resident sets."""
        return sum(child.peak_memory_bytes() for child in self._children)

    def stop(self) -> None:
        """End all replicas; see `Engine.stop`."""
        for child in self._children:
            child.stop()
        self._open.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    # --- inside ---

    def _build_kernels(self) -> None:
        """Build what is to be loaded, here: the children can read the builds and not write them."""
        if self._stack.kernels:
            from kernels.ruler.build import BuildFailed, build

            for promoted in self._stack.kernels:
                try:
                    build(promoted.candidate, promoted.problem, self._builds)
                except BuildFailed as error:
                    detail = f"the kernel for {promoted.problem.name} does not build: {error}"
                    raise EngineFailure("start", detail) from error

    def _start_children(self) -> list[Message]:
        threads = int(self._knobs["threads"])
        self._scratch = Path(tempfile.mkdtemp(prefix="engine-", dir=self._children_dir))
        extra = [("HOME", str(self._scratch)), ("TMPDIR", str(self._scratch))]
        writable = []
        if self._knobs["torch_compile"]:  # trusted code only: nothing promoted runs in such an engine
            compiled = self._builds / "inductor"
            compiled.mkdir(exist_ok=True)
            extra.append(("TORCHINDUCTOR_CACHE_DIR", str(compiled)))
            writable.append(str(compiled))
        environment = children_of.environment_for(threads, str(self._knobs["wait_policy"]), extra)
        message = {
            "op": "start",
            "model_dir": str(self._model_dir),
            "builds": str(self._builds),
            "dtype": self._dtype,
            "knobs": self._knobs,
            "promoted": [promoted_json(promoted) for promoted in self._stack.kernels],
            "max_length": self._longest,
            "warm_input_tokens": self._warm_tokens,
            "scratch": str(self._scratch),
            "writable": writable,
            "memory_bytes": self._memory_bytes,
            "confinement": self._asked_confinement,
        }
        for _ in range(int(self._knobs["replicas"])):
            child = children_of.spawn(
                ENTRY, children=self._children_dir, log=self._log, environment=environment, scratch=self._scratch
            )
            self._children.append(child)
            child.send(message)
        end = time.monotonic() + self._start_timeout_s
        return [child.answer("start", end - time.monotonic()) for child in self._children]

    def _read(self, index: int) -> None:
        """Stamp what comes from one child the moment it is here; replies go to whoever asked."""
        child = self._children[index]
        while True:
            message = child.receive()
            arrived_s = children_of.now_s()
            if message is None or "failure" in message:
                self._replies[index].put(message)
            if message is None or "tokens" in message or "failure" in message:
                self._arrived.put((index, arrived_s, message))
            else:
                self._replies[index].put(message)
            if message is None:
                return

    def _ask(self, index: int, message: Message) -> Message:
        self._children[index].send(message)
        try:
            reply = self._replies[index].get(timeout=self._reply_timeout_s)
        except queue.Empty:
            detail = f"no answer to {message['op']!r} in {self._reply_timeout_s:g} s"
            raise EngineFailure("hang", detail) from None
        if reply is None:
            raise self._children[index].failure()
        children_of.raise_failure(reply)
        return reply

    def _ask_all(self, message: Message) -> list[Message]:
        return [self._ask(index, message) for index in range(len(self._children))]

    def _to_file(self, message: Message, out: Path, suffix: str) -> None:
        """Let the first replica write into the scratch folder, then take the file if it is an ordinary one."""
        if self._scratch is None:
            raise EngineFailure("crash", "the engine is not running")
        path = self._scratch / f"out{suffix}"
        self._ask(0, {**message, "path": str(path)})
        if not path.exists() or not stat.S_ISREG(os.lstat(path).st_mode):
            raise EngineFailure("crash", f"the engine did not write the result of {message['op']!r}")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, out)

    def _check_request(self, request: GenerateRequest) -> None:
        total = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1:
            raise EngineFailure("refused", f"request {request.id}: an empty prompt or no token to give")
        limit = (
            min(self._context or total, self._longest) if self._knobs["scheduler"] == "continuous" else self._context
        )
        if limit and total > limit:
            raise EngineFailure("refused", f"request {request.id}: {total} tokens do not fit a context of {limit}")
        if self._vocabulary and not all(0 <= token < self._vocabulary for token in request.prompt):
            raise EngineFailure("refused", f"request {request.id}: a token outside the vocabulary")
        if request.id in self._open:
            raise EngineFailure("refused", f"request {request.id} is in flight already")
        if not self._children:
            raise EngineFailure("crash", "the engine is not running")


def check_context(workload: Workload, model_dir: Path) -> int:
    """Most tokens that a request of this workload can have.

    Raises:
        InputError: more than the model's context.
    """
    traffic = workload.traffic
    longest = round(traffic.input_tokens * (1 + traffic.length_spread))
    longest += round(traffic.output_tokens * (1 + traffic.length_spread))
    context = context_length(model_dir)
    if context and longest > context:
        raise InputError(
            f"{longest} tokens of input and output exceed the model's context of {context}.",
            remedy="Lower traffic.input_tokens or traffic.output_tokens.",
            key="traffic.input_tokens",
        )
    return longest


def _as_json(request: GenerateRequest) -> dict[str, Any]:
    return {
        "id": request.id, "prompt": list(request.prompt), "max_tokens": request.max_tokens, "exact": request.exact,
    }  # fmt: skip


def promoted_json(promoted: Promoted) -> dict[str, Any]:
    """A promoted candidate for the child. Hidden shapes stay here: it gets the range that they span, and only where the
    verdict names no shapes.
    """
    value = dataclasses.asdict(promoted)
    hidden = promoted.problem.hidden
    corners = (
        [{axis: pick(shape[axis] for shape in hidden) for axis in hidden[0]} for pick in (min, max)] if hidden else []
    )
    value["problem"]["hidden"] = [] if promoted.judged else corners
    return value


def _rows(message: Message) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Rows of a token message, checked: the child may carry promoted code and is not believed."""
    try:
        for request_id, tokens, done in message["tokens"]:
            yield str(request_id), tuple(int(token) for token in tokens), bool(done)
    except (TypeError, ValueError) as error:
        raise EngineFailure("crash", f"the engine sent rubbish: {error}") from error


def _add(a: OverlayCount, b: OverlayCount) -> OverlayCount:
    return a.model_copy(
        update={
            "sites": a.sites + b.sites,
            "taken": a.taken + b.taken,
            "fell_back": a.fell_back + b.fell_back,
            "reasons": dict(Counter(a.reasons) + Counter(b.reasons)),
            "prepare_s": a.prepare_s + b.prepare_s,
            "prepared_bytes": a.prepared_bytes + b.prepared_bytes,
        }
    )
