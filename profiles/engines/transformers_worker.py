"""The child of the `transformers` engine: loads the model, serves requests, answers questions."""

from __future__ import annotations

import os
import queue
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from kernels.ruler.spec import Candidate, Cost, Problem, Tensor
from profiles.engines.base import Promoted
from profiles.engines.child import Channel, Message, is_memory_error, read_into, wait_for_message

GATHER_IDLE_S, GATHER_MOST_S = 0.003, 0.02
"""A batch waits for more requests until none came for the first time, at most for the second."""


def main(channel: Channel) -> None:
    """Entry of the child: start, serve until told to stop. What goes wrong is sent as a failure before it ends."""
    start = channel.receive()
    if start is None:
        return
    try:
        confinement, lacking = confine(start)  # while there is only one thread: later ones inherit it
        inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        read_into(channel, inbox)
        server = _Server(channel, inbox, start)
        channel.send({"ready": server.resolved(), "confinement": confinement, "lacking": lacking})
        server.loop()
    except BaseException as error:
        _fail(channel, error)


class _Server:
    def __init__(self, channel: Channel, inbox: queue.SimpleQueue[Message], start: Message) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from profiles.engines.transformers_static import Batcher

        torch.set_num_threads(int(start["knobs"]["threads"]))  # the sandbox hides what libraries count cores by
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._channel, self._inbox, self._start = channel, inbox, start
        self._knobs = start["knobs"]
        self._max_batch = int(self._knobs["max_batch"])
        model = AutoModelForCausalLM.from_pretrained(
            start["model_dir"],
            dtype=getattr(torch, start["dtype"]),
            attn_implementation=self._knobs["attention"],
            local_files_only=True,
        )
        self._model = model.eval().requires_grad_(False)
        eos = model.generation_config.eos_token_id
        self._stop_tokens = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        model.generation_config.eos_token_id = None  # lengths are exact unless the request says otherwise
        self._overlay = None
        if start["promoted"]:
            from kernels.overlay import install

            promoted = [promoted_from_json(item) for item in start["promoted"]]
            self._overlay = install(self._model, promoted, Path(start["builds"]), torch.get_num_threads())
        compiled = bool(self._knobs["torch_compile"])
        self._batcher = Batcher(
            self._model, cache=self._knobs["cache"], compiled=compiled, max_length=start["max_length"]
        )
        self._continuous: Any = None
        self._cache_class = ""
        self._warm()

    def loop(self) -> None:
        while True:
            message = self._inbox.get()
            if message["op"] == "stop":
                self._end_continuous()
                return
            if message["op"] == "submit":
                self._serve(message)
            else:
                self._channel.send(self._answer(message))

    def resolved(self) -> dict[str, Any]:
        """What is really in force, read back from the model and from torch."""
        import torch

        text = self._model.config.get_text_config()
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in self._model.parameters()})
        frames = 0
        if self._knobs["torch_compile"]:
            frames = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return {
            "threads": torch.get_num_threads(),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default").lower(),
            "dtype": "+".join(dtypes),
            "max_batch": self._max_batch,
            "scheduler": self._knobs["scheduler"],
            "cache": self._cache_class,
            "attention": self._model.config._attn_implementation,
            "torch_compile": frames > 0,
            "prompt_lookup": int(self._knobs["prompt_lookup"]),
            "malloc_mmap_threshold": os.environ.get("MALLOC_MMAP_THRESHOLD_", ""),
            "max_length": int(self._start["max_length"]),
            "context": int(getattr(text, "max_position_embeddings", 0) or 0),
        }

    def _serve(self, message: Message) -> None:
        """Serve the request, and those that come with it."""
        if self._knobs["scheduler"] == "continuous":
            if self._continuous is None:
                self._begin_continuous()
            self._continuous.submit(self._work(message))
            return
        batch = [self._work(message)]
        begun = time.perf_counter()
        while len(batch) < self._max_batch and time.perf_counter() - begun < GATHER_MOST_S:
            more = wait_for_message(self._inbox, GATHER_IDLE_S)
            if more is None:
                break
            if more["op"] != "submit":
                self._inbox.put(more)  # a question waits until the batch is through
                break
            batch.append(self._work(more))
        self._run(batch, self._emit)

    def _run(self, batch: list[Any], emit: Any) -> None:
        from profiles.engines.transformers_static import lookup

        if self._knobs["prompt_lookup"]:
            for work in batch:
                lookup(self._model, work, int(self._knobs["prompt_lookup"]), emit)
        else:
            self._batcher.run(batch, emit)

    def _work(self, message: Message) -> Any:
        from profiles.engines.transformers_static import Work

        stop = frozenset() if message["exact"] else self._stop_tokens
        return Work(message["id"], message["prompt"], message["max_tokens"], stop)

    def _emit(self, rows: list[tuple[str, list[int], bool]]) -> None:
        self._channel.send({"tokens": rows})

    def _answer(self, message: Message) -> Message:
        op = message["op"]
        if op == "score":
            self._end_continuous()
            self._batcher.score(message["sequences"], message["prefix"], message["path"], self._max_batch)
            return {"done": op}
        if op == "profile":
            self._end_continuous()
            self._profile([self._work(item) for item in message["requests"]], message["path"])
            return {"done": op}
        if op == "counts":
            return {"counts": self._overlay.counts() if self._overlay is not None else []}
        if op == "reset_counts":
            if self._overlay is not None:
                self._overlay.reset()
            return {"done": op}
        raise ValueError(f"unknown operation {op!r}")

    def _profile(self, requests: list[Any], path: str) -> None:
        """Under the profiler batches go through the public forward, whatever the scheduler: it sees one thread only."""
        import json

        from profiles.operators_child import collect_in_child

        def run() -> None:
            for first in range(0, len(requests), self._max_batch):
                self._run(requests[first : first + self._max_batch], lambda rows: None)

        Path(path).write_text(json.dumps(collect_in_child(self._model, run)))

    def _warm(self) -> None:
        """Serve a batch like those to come, so that the first timed one pays for nothing."""
        from profiles.engines.transformers_static import Work

        start = self._start
        vocabulary = self._model.config.get_text_config().vocab_size
        prompt = [(7 * i + 3) % vocabulary for i in range(start["warm_input_tokens"])]
        batch = [Work(f"warm-{row}", prompt, 4) for row in range(self._max_batch)]
        if self._knobs["scheduler"] != "continuous":
            self._run(batch, lambda rows: None)
            self._cache_class = self._batcher.cache_class if not self._knobs["prompt_lookup"] else "DynamicCache"
        else:
            waiting, finished = len(batch), queue.SimpleQueue[bool]()

            def count(rows: list[tuple[str, list[int], bool]]) -> None:
                for _ in filter(lambda row: row[2], rows):
                    finished.put(True)

            self._begin_continuous(count)
            for work in batch:
                self._continuous.submit(work)
            for _ in range(waiting):
                finished.get(timeout=120)
            self._cache_class = self._continuous.cache_class
            self._end_continuous()
        if self._overlay is not None:
            self._overlay.reset()

    def _begin_continuous(self, emit: Any = None) -> None:
        from profiles.engines.transformers_continuous import Continuous

        self._continuous = Continuous(
            self._model,
            max_batch=self._max_batch,
            max_length=self._start["max_length"],
            emit=emit or self._emit,
            failed=self._die,
        )

    def _end_continuous(self) -> None:
        if self._continuous is not None:
            self._continuous.stop()
            self._continuous = None

    def _die(self, error: BaseException) -> None:
        _fail(self._channel, error)
        os._exit(1)


def confine(start: Message) -> tuple[str, list[str]]:
    """Enter the confinement that was asked for: (level reached, what was lacking)."""
    from kernels.ruler import sandbox

    root = str(Path(__file__).resolve().parents[2])
    read = (sys.prefix, sys.base_prefix, root, start["model_dir"], start["builds"], "/sys", "/etc")
    write = (start["scratch"], *start["writable"])
    policy = sandbox.Policy(
        read=read, write=write, memory_bytes=start["memory_bytes"], tmp_bytes=1 << 36, cpu_s=1 << 30,
        level=start["confinement"],
    )  # fmt: skip
    lacking = sandbox.enter(policy, namespaced=False)
    return sandbox.level_reached(policy, lacking), lacking


def promoted_from_json(value: dict[str, Any]) -> Promoted:
    """A promoted candidate back from `dataclasses.asdict`, lists and all."""
    problem = dict(value["problem"])
    for key in ("inputs", "outputs"):
        problem[key] = tuple(
            Tensor(**{**t, "shape": None if t["shape"] is None else tuple(t["shape"])}) for t in problem[key]
        )
    problem["cost"] = Cost(**problem["cost"])
    for key in ("visible", "hidden", "reduction_axes", "regimes"):
        problem[key] = tuple(problem[key])
    return Promoted(Problem(**problem), Candidate(**value["candidate"]), value["verdict_id"], tuple(value["judged"]))


def _fail(channel: Channel, error: BaseException) -> None:
    traceback.print_exception(error)  # into the log
    text = f"{type(error).__name__}: {error}"
    kind = "out_of_memory" if isinstance(error, MemoryError) or is_memory_error(text) else "crash"
    try:
        channel.send({"failure": kind, "detail": text[:2000]})
    except OSError:
        print("the parent is gone", file=sys.stderr)
