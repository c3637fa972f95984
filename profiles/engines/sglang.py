"""SGLang, in an environment of its own, spoken to over HTTP: the same protocol as every engine. No overlay."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kernels.errors import InputError
from profiles.engines import child as children_of
from profiles.engines.base import (
    EngineFailure,
    GenerateRequest,
    Knob,
    KnobSpec,
    OverlayCount,
    Resolved,
    Stack,
    TokenEvent,
)
from profiles.engines.transformers_engine import check_context
from profiles.workload import Workload

FLAGS: dict[str, str] = {
    "max_running_requests": "--max-running-requests",
    "max_total_tokens": "--max-total-tokens",
    "attention_backend": "--attention-backend",
    "chunked_prefill_size": "--chunked-prefill-size",
    "schedule_policy": "--schedule-policy",
    "mem_fraction_static": "--mem-fraction-static",
}
"""Knobs that are options of the server; left out, SGLang decides."""

# SGLang's CPU path imports these and calls none of them on Llama; a call raises.
_SITECUSTOMIZE = """
import importlib.abc, importlib.machinery, os, sys, types
STUBS = ("sgl_kernel", "torchaudio", "torchvision._meta_registrations")
class Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        def refuse(*args, **kwargs):
            raise NotImplementedError(f"{self.__name__}.{name} does not exist on this machine")
        return refuse
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(name == stub or name.startswith(stub + ".") for stub in STUBS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Stub(spec.name)
    def exec_module(self, module):
        module.__path__ = []
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, Finder())
"""


def knob_specs(workload: Workload, model_dir: Path) -> tuple[KnobSpec, ...]:
    """What the settings search may turn."""
    concurrency = workload.traffic.concurrency
    return (
        KnobSpec(name="threads", choices=(0, 1), default=0, help="OpenMP threads of the server on a CPU; 0: its own"),
        KnobSpec(
            name="max_running_requests",
            choices=tuple(sorted({0, concurrency, max(1, concurrency // 2)})),
            default=0,
            help="most requests that run at once; 0: SGLang decides",
        ),
        KnobSpec(name="schedule_policy", choices=("fcfs", "lpm"), default="fcfs", help="order of waiting requests"),
    )


def keep(channel: children_of.Channel) -> None:
    """Entry of the child: starts the server in its group, tells how it ended; ends with the parent."""
    start = channel.receive()
    if start is None:
        return
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    children_of.read_into(channel, inbox)
    process = subprocess.Popen(start["command"], env=start["environment"], cwd=start["cwd"])
    channel.send({"started": process.pid})
    code = process.wait()
    channel.send({"failure": "crash", "detail": f"the server ended with exit code {code}"})


class SGLangEngine:
    """See `profiles.engines.base.Engine`. Knob `python`: the interpreter of SGLang's environment."""

    def __init__(
        self,
        workload: Workload,
        model_dir: Path,
        stack: Stack,
        *,
        children: Path,
        builds: Path,
        log: Path,
        start_timeout_s: float = 300.0,
        reply_timeout_s: float = 600.0,
    ) -> None:
        self._knobs = dict(stack.settings.knobs)
        unknown = sorted(set(self._knobs) - {"python", "device", "threads", *FLAGS})
        if unknown:
            known = ", ".join(("python", "device", "threads", *FLAGS))
            raise InputError("No such knob.", remedy=f"Known: {known}.", key=f"engine.knobs.{unknown[0]}")
        python = str(self._knobs.get("python", ""))
        if not python or not os.access(python, os.X_OK):
            raise InputError(
                "SGLang needs an interpreter of an environment of its own.",
                remedy="Give the path of its python.",
                key="engine.knobs.python",
            )
        self._longest = check_context(workload, model_dir)
        self._workload, self._model_dir, self._stack = workload, model_dir.resolve(), stack
        self._children_dir, self._log = children, log
        self._start_timeout_s, self._reply_timeout_s = start_timeout_s, reply_timeout_s
        self._child: children_of.Child | None = None
        self._scratch: Path | None = None
        self._arrived: queue.SimpleQueue[TokenEvent | EngineFailure] = queue.SimpleQueue()
        self._open: set[str] = set()
        self._url = ""
        self.confinement = "none"
        """An own session and a clean environment, no more."""

    def __enter__(self) -> SGLangEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Resolved:
        """Start the server and wait until it is healthy; the resolved settings are its own `/server_info`."""
        if self._stack.kernels:
            raise EngineFailure("refused", "promoted kernels are not put into SGLang")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._children_dir.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="sglang-", dir=self._children_dir)).resolve()
        (self._scratch / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        self._url = f"http://127.0.0.1:{port}"
        try:
            self._child = children_of.spawn(
                "profiles.engines.sglang:keep",
                children=self._children_dir,
                log=self._log,
                name="sglang",
                scratch=self._scratch,
            )
            command, environment = self._command(port)
            start = {"op": "start", "command": command, "environment": environment, "cwd": str(self._scratch)}
            self._child.ask(start, 30)
            self._wait_healthy()
            info = self._get("/server_info")
        except BaseException:
            self.stop()
            raise
        config = {key: value for key, value in sorted(info.items()) if isinstance(value, (str, int, float, bool))}
        volatile = ("port", "random_seed", "version", "nccl_port", "host", "served_model_name")
        for key in [key for key in config if key in volatile or "time" in key or "throughput" in key]:
            del config[key]
        return Resolved(engine="sglang", version=f"sglang {info.get('version', 'unknown')}", config=config)

    def submit(self, request: GenerateRequest) -> None:
        """Send the request from a thread of its own, which stamps what comes back."""
        if self._child is None:
            raise EngineFailure("crash", "the server is not running")
        if len(request.prompt) + request.max_tokens > self._longest:
            raise EngineFailure("refused", f"request {request.id} is longer than {self._longest} tokens")
        self._open.add(request.id)
        threading.Thread(target=self._stream, args=(request,), daemon=True).start()

    def events(self, timeout_s: float) -> Iterator[TokenEvent]:
        """Yield what has arrived; see `Engine.events`."""
        wait = timeout_s
        while True:
            try:
                item = self._arrived.get(timeout=wait) if wait > 0 else self._arrived.get_nowait()
            except queue.Empty:
                if wait > 0 and self._open:
                    raise EngineFailure("hang", f"nothing came for {timeout_s:g} s") from None
                return
            if isinstance(item, EngineFailure):
                raise item
            if item.done:
                self._open.discard(item.request_id)
            yield item
            wait = 0.0

    def score(self, sequences: Sequence[Sequence[int]], prefix: int, out: Path) -> None:
        """Log-probabilities by one request a position with all of the vocabulary; raises `refused` when not offered."""
        length = len(sequences[0])
        rows = []
        for sequence in sequences:
            steps = []
            for end in range(prefix, length):
                body = {
                    "input_ids": list(sequence[:end]),
                    "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
                    "return_logprob": True,
                    "top_logprobs_num": self._vocabulary(),
                }
                found = json.load(self._post("/generate", body))["meta_info"].get("output_top_logprobs")
                if not found or not found[0]:
                    raise EngineFailure("refused", "the server gives no log-probabilities")
                step = np.full(self._vocabulary(), -np.inf, dtype=np.float32)
                for logprob, token, *_ in found[0]:
                    step[int(token)] = logprob
                steps.append(step)
            rows.append(np.stack(steps))
        out.parent.mkdir(parents=True, exist_ok=True)
        np.save(out, np.stack(rows))

    def profile(self, requests: Sequence[GenerateRequest], out: Path) -> None:
        """SGLang has a profiler of its own; its traces are not read. Raises EngineFailure (`refused`)."""
        raise EngineFailure("refused", "operators of an SGLang server are not profiled")

    def counts(self) -> tuple[OverlayCount, ...]:
        """No promoted kernels, no counts."""
        return ()

    def reset_counts(self) -> None:
        """Nothing to reset."""

    def peak_memory_bytes(self) -> int:
        """Sum of the highest resident sets of the server's processes."""
        return self._child.peak_memory_bytes() if self._child is not None else 0

    def stop(self) -> None:
        """End the server and all its processes."""
        if self._child is not None:
            self._child.stop()
            self._child = None
        self._open.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    # --- inside ---

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        device = str(self._knobs.get("device", "cpu"))
        command = [str(self._knobs["python"]), "-m", "sglang.launch_server", "--model-path", str(self._model_dir)]
        command += ["--device", device, "--dtype", self._workload.model.dtype, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--skip-server-warmup"]
        environment = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": str(self._scratch)}
        knobs: dict[str, Knob] = {name: value for name, value in self._knobs.items() if name in FLAGS and value != 0}
        if device == "cpu":
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(self._knobs.get("threads") or 1)}
            command += ["--disable-cuda-graph", "--sleep-on-idle"]
            # Without the second the pool takes 6 GB whatever is asked of it.
            slots = 2 * self._workload.traffic.concurrency
            defaults: dict[str, Knob] = {
                "attention_backend": "torch_native",
                "mem_fraction_static": 0.3,
                "max_total_tokens": 8192,
            }
            defaults["max_total_tokens"] = max(8192, slots * self._longest)
            knobs = {**defaults, "max_running_requests": slots, **knobs}
        for name, value in knobs.items():
            command += [FLAGS[name], str(value)]
        return command, environment

    def _wait_healthy(self) -> None:
        end = time.monotonic() + self._start_timeout_s
        while time.monotonic() < end:
            assert self._child is not None
            if self._child.waiting(0.2):
                ended = self._child.receive()
                detail = str((ended or {}).get("detail", "")) + "\n" + self._child.tail()
                kind = "out_of_memory" if children_of.is_memory_error(detail) else "start"
                raise EngineFailure(kind, detail)  # type: ignore[arg-type]
            try:
                with urllib.request.urlopen(self._url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (OSError, ValueError):
                continue
        raise EngineFailure("hang", f"the server was not healthy after {self._start_timeout_s:g} s")

    def _stream(self, request: GenerateRequest) -> None:
        """One request: server-sent events until `[DONE]`; token lists may be cumulative or not, by server option."""
        body = {
            "input_ids": list(request.prompt),
            "sampling_params": {
                "max_new_tokens": request.max_tokens, "temperature": 0, "ignore_eos": request.exact,
            },
            "stream": True,
        }  # fmt: skip
        given = 0
        try:
            with self._post("/generate", body) as answer:
                for line in answer:
                    arrived_s = children_of.now_s()
                    text = line.decode().strip()
                    if not text.startswith("data:") or text == "data: [DONE]":
                        continue
                    event = json.loads(text[5:])
                    if "error" in event:
                        raise OSError(str(event["error"]))
                    total = int(event["meta_info"]["completion_tokens"])
                    ids = event["output_ids"]
                    new = tuple(ids[given:] if len(ids) == total else ids)
                    given += len(new)
                    done = bool(event["meta_info"].get("finish_reason"))
                    self._arrived.put(TokenEvent(request.id, new, arrived_s, done))
                    if done:
                        return
            raise OSError("the stream ended early")
        except (OSError, ValueError, KeyError, TypeError) as error:
            child = self._child
            if child is None:
                return
            if child.waiting(1.0):
                detail = f"{child.receive()} {child.tail()}"
                kind = "out_of_memory" if children_of.is_memory_error(detail) else "crash"
                self._arrived.put(EngineFailure(kind, detail))  # type: ignore[arg-type]
            else:  # the server lives: this request alone failed
                self._arrived.put(TokenEvent(request.id, (), children_of.now_s(), True, str(error)))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(self._url + path, data, headers), timeout=self._reply_timeout_s
        )

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self._url + path, timeout=30) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ValueError) as error:
            raise EngineFailure("start", f"the server does not answer {path}: {error}") from error

    def _vocabulary(self) -> int:
        from profiles.models import read_config

        return int(read_config(self._model_dir)["vocab_size"])
