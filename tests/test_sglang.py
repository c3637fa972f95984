"""The SGLang adapter against a real HTTP server that speaks the same endpoints."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from kernels.errors import InputError
from profiles.engines import open_engine
from profiles.engines.base import EngineFailure, GenerateRequest, Settings, Stack

SERVER = """#!{python}
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = sys.argv[1:]
assert arguments[:2] == ["-m", "sglang.launch_server"], arguments
value = dict(zip(arguments[2:], arguments[3:]))
if value["--dtype"] == "float16":
    print("RuntimeError: out of memory", file=sys.stderr); sys.exit(1)
assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1" and "ANTHROPIC_API_KEY" not in os.environ
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
        info = {{"version": "0.5.23", "dtype": value["--dtype"], "port": int(value["--port"]), "max_running_requests":
            int(value["--max-running-requests"]), "nested": {{}}}}
        self.wfile.write(json.dumps(info if self.path == "/server_info" else {{}}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, n = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if prompt[0] == 13: os._exit(3)
        if prompt[0] == 14: self.send_error(400); return
        self.send_response(200); self.end_headers()
        cumulative = prompt[0] != 15
        for i in range(1, n + 1):
            ids = [prompt[0] + j for j in range(i)]
            event = {{"output_ids": ids if cumulative else ids[-1:], "meta_info":
                {{"completion_tokens": i, "finish_reason": {{"type": "length"}} if i == n else None}}}}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n"); self.wfile.flush()
        self.wfile.write(b"data: [DONE]\\n\\n")
ThreadingHTTPServer(("127.0.0.1", int(value["--port"])), Handler).serve_forever()
"""


def make(workload, model: Path, tmp: Path, **knobs):
    python = tmp / "python"
    python.write_text(SERVER.format(python=sys.executable))
    python.chmod(0o755)
    stack = Stack(Settings(engine="sglang", knobs={"python": str(python), **knobs}))
    return open_engine(workload, model, stack, children=tmp / "c", builds=tmp / "b", log=tmp / "log")


def test_streams_resolves_and_leaves_nothing(tiny_workload, tiny_model, tmp_path) -> None:
    with make(tiny_workload, tiny_model, tmp_path, max_running_requests=4) as engine:
        resolved = engine.start()
        assert resolved.version == "sglang 0.5.23"
        assert resolved.config == {"dtype": "float32", "max_running_requests": 4}
        for first in (15, 20):
            engine.submit(GenerateRequest(id=str(first), prompt=(first, 1, 2), max_tokens=5))
        engine.submit(GenerateRequest(id="bad", prompt=(14, 1), max_tokens=5))
        tokens: dict[str, list[int]] = {"15": [], "20": [], "bad": []}
        waiting = set(tokens)
        errors = {}
        while waiting:
            for event in engine.events(20):
                tokens[event.request_id] += event.tokens
                assert event.arrived_s <= time.perf_counter()
                if event.done:
                    waiting.remove(event.request_id)
                    errors[event.request_id] = event.error
        assert tokens == {"15": [15, 16, 17, 18, 19], "20": [20, 21, 22, 23, 24], "bad": []}
        assert errors["15"] is None
        assert "400" in (errors["bad"] or "")
        assert engine.counts() == ()
        assert engine.peak_memory_bytes() > 0
        assert engine._child is not None
        family = [p.pid for p in psutil.Process(engine._child.pid).children(recursive=True)]
        assert family
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in family)
    assert list((tmp_path / "c").iterdir()) == []


def test_a_dead_server_is_a_crash_and_a_bad_start_tells_why(tiny_workload, tiny_model, tmp_path) -> None:
    with make(tiny_workload, tiny_model, tmp_path) as engine:
        engine.start()
        engine.submit(GenerateRequest(id="a", prompt=(13,), max_tokens=2))
        with pytest.raises(EngineFailure) as caught:
            list(engine.events(20))
        assert caught.value.kind == "crash"
    half = tiny_workload.model_copy(update={"model": tiny_workload.model.model_copy(update={"dtype": "float16"})})
    with make(half, tiny_model, tmp_path) as engine, pytest.raises(EngineFailure) as caught:
        engine.start()
    assert caught.value.kind == "out_of_memory"
    with pytest.raises(InputError, match=r"engine\.knobs\.tp"):
        make(tiny_workload, tiny_model, tmp_path, tp=2)
    with pytest.raises(InputError, match="interpreter"):
        make(tiny_workload, tiny_model, tmp_path, python="/nowhere")
