"""An engine in a real child process whose speed and honesty are scripted, and a real model that it can serve honestly.

The model is a Llama whose attention and MLP add nothing, so that its next token depends on the last one alone: the
child serves it from a table without torch, while the clean reference runs the real network.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from pathlib import Path

import numpy as np

from profiles.engines.base import EngineFailure, GenerateRequest, OverlayCount, Resolved, TokenEvent
from profiles.engines.child import read_into, spawn, wait_for_message

VOCABULARY = 512


def make_model(folder: Path) -> np.ndarray:
    """Save the model; returns its log-probabilities, float32 of shape [last token, next token]."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_(std=0.5)
        logits = model(input_ids=torch.arange(VOCABULARY)[:, None]).logits[:, 0]
        table = torch.log_softmax(logits.double(), -1).float().numpy()
    model.save_pretrained(folder)
    np.save(folder / "table.npy", table)
    return table


class ScriptedEngine:
    """The parent's side. `script` says how the child behaves; see `serve`."""

    def __init__(self, folder: Path, model: Path, **script) -> None:
        self._folder, self._model, self._script = folder, model, script
        self._child = None
        self.memory = script.pop("memory", 1 << 20)

    def start(self) -> Resolved:
        if self._script.get("refuse"):
            raise EngineFailure("out_of_memory", "scripted to be too large")
        self._child = spawn("tests.scripted_engine:serve", children=self._folder, log=self._folder / "engine.log")
        self._child.send({"table": str(self._model / "table.npy"), **self._script})
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._replies: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._replies.get(timeout=60) == {"op": "ready"}
        return Resolved(engine="scripted", version="1", config={"token_s": self._script.get("token_s")})

    @property
    def process_group(self) -> int | None:
        return None if self._child is None else self._child.pid

    def _read(self) -> None:
        while (message := self._child.receive()) is not None:
            if message.get("op") == "tokens":
                now = time.perf_counter()
                error = message.get("error")
                event = TokenEvent(message["id"], tuple(message["tokens"]), now, message["done"], error)
                self._inbox.put(event)
            else:
                self._replies.put(message)
        self._inbox.put(None)
        self._replies.put(None)

    def submit(self, request: GenerateRequest) -> None:
        self._child.send({"op": "submit", **request.model_dump()})

    def events(self, timeout_s: float):
        try:
            event = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineFailure("hang", "nothing came") from None
        while True:
            if event is None:
                raise EngineFailure("crash", "the child is gone")
            yield event
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _ask(self, **message):
        self._child.send(message)
        reply = self._replies.get(timeout=60)
        if reply is None:
            raise EngineFailure("crash", "the child is gone")
        return reply

    def score(self, sequences, prefix: int, out: Path) -> None:
        self._ask(op="score", sequences=[list(s) for s in sequences], prefix=prefix, out=str(out))

    def profile(self, requests, out: Path) -> None:
        raise EngineFailure("refused", "has no profiler")

    def counts(self) -> tuple[OverlayCount, ...]:
        return tuple(OverlayCount(**c) for c in self._ask(op="counts")["counts"])

    def reset_counts(self) -> None:
        self._ask(op="reset")

    def peak_memory_bytes(self) -> int:
        return self.memory

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def serve(channel) -> None:
    """The child. Script: `token_s` (one step of all requests), `fast` (the same for prompts in `memorised`),
    `prefill_s`, `noise` (relative, of a step), `junk` (share of tokens that are random), `chunk` (tokens held back and
    sent at once), `short`, `long` (tokens too few, too many), `fail_every`, `crash_after` (tokens), `hang_after`,
    `witness` (`nan`, `flat`), `kernel` (name of a promoted kernel), `unused` (it is never taken).
    """
    script = channel.receive()
    table = np.load(script["table"])
    following = table.argmax(-1)
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    read_into(channel, inbox)
    channel.send({"op": "ready"})
    rng = random.Random(4)
    memorised = {tuple(p) for p in script.get("memorised", ())}
    active: dict[str, dict] = {}
    served = emitted = taken = 0
    while True:
        message = wait_for_message(inbox, 0 if active else 3600)
        if message is not None:
            if message["op"] == "stop":
                return
            if message["op"] == "submit":
                served += 1
                if script.get("fail_every") and served % script["fail_every"] == 0:
                    channel.send({"op": "tokens", "id": message["id"], "tokens": [], "done": True, "error": "scripted"})
                    continue
                time.sleep(script.get("prefill_s", 0.0))
                left = message["max_tokens"] - script.get("short", 0) + script.get("long", 0)
                known = tuple(message["prompt"]) in memorised
                active[message["id"]] = {"last": message["prompt"][-1], "left": left, "held": [], "known": known}
            elif message["op"] == "score":
                sequences = np.array(message["sequences"])
                values = table[sequences[:, message["prefix"] - 1 : -1]]
                if script.get("witness") == "nan":
                    values = values.copy()
                    values[0, 0, 0] = np.nan
                elif script.get("witness") == "flat":
                    values = np.full_like(values, -np.log(VOCABULARY))
                np.save(message["out"], values.astype(np.float32))
                taken += 1
                channel.send({"op": "scored"})
            elif message["op"] == "counts":
                name, used = script.get("kernel"), 0 if script.get("unused") else taken
                row = {"problem": name, "candidate": "c", "sites": 1, "taken": used, "fell_back": taken - used}
                channel.send({"op": "counts", "counts": [row] if name else []})
            elif message["op"] == "reset":
                taken = 0
                channel.send({"op": "reset"})
            continue
        step = script.get("token_s", 0.002)
        if active and all(r["known"] for r in active.values()):
            step = script.get("fast", step)
        time.sleep(step * (1 + script.get("noise", 0.0) * rng.random()))
        taken += 1
        for name, request in list(active.items()):
            emitted += 1
            if script.get("crash_after") and emitted > script["crash_after"]:
                os._exit(7)
            if script.get("hang_after") and emitted > script["hang_after"]:
                time.sleep(3600)
            request["last"] = int(following[request["last"]])
            out = rng.randrange(VOCABULARY) if rng.random() < script.get("junk", 0.0) else request["last"]
            request["held"].append(out)
            request["left"] -= 1
            done = request["left"] <= 0
            if done or len(request["held"]) >= script.get("chunk", 1):
                channel.send({"op": "tokens", "id": name, "tokens": request["held"], "done": done})
                request["held"] = []
            if done:
                del active[name]
