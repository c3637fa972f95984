"""transformers' own continuous batching: its manager runs the steps in a thread, and what it streams is passed on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from profiles.engines.transformers_static import Emit, Work

PAGE_TOKENS = 256


class Continuous:
    """A running manager. `failed` is called, from its thread, with what went wrong."""

    def __init__(
        self, model: Any, *, max_batch: int, max_length: int, emit: Emit, failed: Callable[[BaseException], None]
    ) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._emit, self._failed = emit, failed
        self._given: dict[str, int] = {}
        self._stopping = False
        pages = max_batch * -(-max_length // PAGE_TOKENS)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=pages + max_batch,
                max_batch_tokens=max_batch * max_length,
                max_requests_per_batch=max_batch,
                # A prompt that is served twice must cost the same twice: no prefix is kept.
                allow_block_sharing=False,
            ),
        )
        self._manager.start()
        self._thread = threading.Thread(target=self._pump, name="continuous-out", daemon=True)
        self._thread.start()

    @property
    def cache_class(self) -> str:
        """Class of the cache in use."""
        processor = self._manager.batch_processor
        return type(processor.cache).__name__ if processor is not None else "PagedAttentionCache"

    def submit(self, work: Work) -> None:
        """Hand one request to the manager."""
        self._given[work.id] = 0
        self._manager.add_request(
            work.prompt,
            request_id=work.id,
            max_new_tokens=work.max_tokens,
            streaming=True,
            eos_token_id=sorted(work.stop) or -1,
        )

    def stop(self) -> None:
        """End the manager and its threads."""
        self._stopping = True
        self._manager.stop(block=True)
        self._thread.join()

    def _pump(self) -> None:
        """Pass on what the manager streams: it repeats all tokens of a request each time, we send the new ones."""
        try:
            while not self._stopping:
                result = self._manager.get_result(timeout=0.05)
                out = []
                while result is not None:
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    before = self._given.get(result.request_id, 0)
                    done = result.is_finished()
                    if done:
                        self._given.pop(result.request_id, None)
                    else:
                        self._given[result.request_id] = len(result.generated_tokens)
                    out.append((result.request_id, list(result.generated_tokens[before:]), done))
                    result = self._manager.get_result(timeout=0)
                if out:
                    self._emit(out)
                elif not self._manager.is_running() and not self._stopping:
                    fatal = self._manager.background_thread_status.fatal_error
                    raise RuntimeError(f"continuous batching ended by itself: {fatal}") from fatal
        except BaseException as error:
            self._failed(error)
