"""Batches through the public forward and Cache API of transformers: prefill once, then greedy steps, token by token.

The stock path is no slower than `generate()`: like it, logits are computed for the last position only
(`logits_to_keep=1`); unlike it, there are no logits processors and no stopping criteria objects between two steps.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Emit = Callable[[list[tuple[str, list[int], bool]]], None]
"""Called after each step with (request id, new tokens, done) of every row."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One request inside the child."""

    id: str
    prompt: list[int]
    max_tokens: int
    stop: frozenset[int] = frozenset()
    """Tokens that end it early; empty when lengths are exact."""


class Batcher:
    """Runs batches to their end. `cache`: `dynamic` (grows) or `static` (allocated once for `max_length` tokens)."""

    def __init__(self, model: Any, *, cache: str, compiled: bool, max_length: int) -> None:
        self.model = model
        self._kind = cache
        self._max_length = max_length
        self._static: dict[tuple[int, int], Any] = {}
        self._decode = torch.compile(model.forward, dynamic=False) if compiled else model
        # The keyword was renamed within transformers 5; the old one still works there, with a warning at each call.
        names = inspect.signature(model.forward).parameters
        self._cache_key = "cache" if "cache" in names else "past_key_values"
        self.cache_class = ""
        """Class of the cache that the last batch really used."""

    @torch.inference_mode()
    def run(self, requests: Sequence[Work], emit: Emit) -> None:
        """Serve one batch to its end; rows that are done leave a dynamic cache at once."""
        rows = list(requests)
        ids, mask, positions = _left_pad([work.prompt for work in rows])
        cache = self._new_cache(len(rows), ids.shape[1] + max(work.max_tokens for work in rows))
        given = [0] * len(rows)
        done = [False] * len(rows)
        forward = self.model
        while True:
            tokens = self._step(forward, ids, mask, positions, cache).argmax(dim=-1)
            forward = self._decode
            out = []
            for row, token in enumerate(tokens.tolist()):
                if not done[row]:
                    given[row] += 1
                    done[row] = given[row] >= rows[row].max_tokens or token in rows[row].stop
                    out.append((rows[row].id, [token], done[row]))
            emit(out)
            if all(done):
                return
            if any(done) and self._kind == "dynamic":
                keep = [row for row, over in enumerate(done) if not over]
                index = torch.tensor(keep)
                cache.batch_select_indices(index)
                tokens = tokens[index]
                mask = None if mask is None else mask[index]
                positions = None if positions is None else positions[index]
                rows, given = [rows[row] for row in keep], [given[row] for row in keep]
                done = [False] * len(rows)
            ids = tokens.unsqueeze(1)
            if mask is not None and positions is not None:
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                positions = positions[:, -1:] + 1

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]], prefix: int, path: str, max_batch: int) -> None:
        """Teacher-force through the decode path; see `Engine.score`."""
        tokens = torch.tensor(sequences, dtype=torch.long)
        count, length = tokens.shape
        shape = (count, length - prefix, self.model.config.get_text_config().vocab_size)
        out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        for first in range(0, count, max_batch):
            chunk = tokens[first : first + max_batch]
            cache = self._new_cache(len(chunk), length)
            forward, ids = self.model, chunk[:, :prefix]
            for step in range(length - prefix):
                logits = self._step(forward, ids, None, None, cache)
                out[first : first + len(chunk), step] = logits.float().log_softmax(dim=-1).numpy()
                forward, ids = self._decode, chunk[:, prefix + step : prefix + step + 1]
        out.flush()

    def _step(self, forward: Any, ids: torch.Tensor, mask: Any, positions: Any, cache: Any) -> torch.Tensor:
        """Logits [rows, vocabulary] of the last position."""
        arguments = {self._cache_key: cache, "use_cache": True, "logits_to_keep": 1}
        if mask is not None:  # without padding there is nothing to mask, and transformers takes its causal fast path
            arguments |= {"attention_mask": mask, "position_ids": positions}
        return forward(input_ids=ids, **arguments).logits[:, -1]

    def _new_cache(self, rows: int, length: int) -> Any:
        from transformers import DynamicCache, StaticCache

        cache: Any
        if self._kind == "dynamic":
            cache = DynamicCache(config=self.model.config)
        else:
            size = max(length, self._max_length)
            size += -size % 64  # few different sizes: each is a shape of its own to torch.compile
            cache = self._static.get((rows, size))
            if cache is None:
                cache = StaticCache(config=self.model.config, max_cache_len=size)
                self._static = {(rows, size): cache}  # one at a time: memory
            cache.reset()
        self.cache_class = type(cache).__name__
        return cache


def _left_pad(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Token ids [rows, longest], and mask and positions of the same shape where the lengths differ."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], dtype=torch.long)
    if all(len(prompt) == longest for prompt in prompts):
        return ids, None, None
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.long)
    return ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0)


def lookup(model: Any, work: Work, draft_tokens: int, emit: Emit) -> None:
    """Serve one request by transformers' own assisted generation, drafting from the prompt."""
    from transformers.generation.streamers import BaseStreamer

    class Stream(BaseStreamer):
        prompt_seen = False
        given = 0

        def put(self, value: torch.Tensor) -> None:
            if not self.prompt_seen:
                self.prompt_seen = True
                return
            tokens = value.reshape(-1).tolist()[: work.max_tokens - self.given]
            self.given += len(tokens)
            if tokens:
                emit([(work.id, tokens, False)])

        def end(self) -> None:
            emit([(work.id, [], True)])

    ids = torch.tensor([work.prompt], dtype=torch.long)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            prompt_lookup_num_tokens=draft_tokens,
            max_new_tokens=work.max_tokens,
            do_sample=False,
            eos_token_id=sorted(work.stop) or None,
            streamer=Stream(),
        )
