"""The `transformers` engine in a real child: tokens, failures, orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from kernels.errors import InputError
from profiles.engines import child, knob_specs, open_engine
from profiles.engines.base import Engine, EngineFailure, GenerateRequest, Resolved, Settings, Stack
from profiles.workload import ModelSpec, TrafficSpec, Workload

PROMPT = [(31 * i) % 2000 + 40 for i in range(16)]


def make(workload: Workload, model: Path, tmp: Path, *, engine: str = "transformers", options=None, **knobs) -> Engine:
    stack = Stack(Settings(engine=engine, knobs={"threads": 1, **knobs} if engine == "transformers" else knobs))
    places = {"children": tmp / "children", "builds": tmp / "builds", "log": tmp / "engine.log"}
    return open_engine(workload, model, stack, **places, **(options or {}))


def collect(engine: Engine, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = defaultdict(list)
    open_ids = {request.id for request in requests}
    while open_ids:
        for event in engine.events(60):
            tokens[event.request_id] += event.tokens
            assert event.arrived_s <= time.perf_counter()
            if event.done:
                open_ids.remove(event.request_id)
    return dict(tokens)


def drain(engine: Engine) -> None:
    while True:
        list(engine.events(30))


def prompts(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tuple((17 * i * (row + 3) + row) % 2000 + 40 for i in range(n)) for row, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[tuple[int, ...], list[int]]:
    """Greedy tokens of `model.generate`, one prompt at a time, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    out = {}
    for prompt in prompts((5, 16, 1, 11)):
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        out[prompt] = found[0, len(prompt) :].tolist()
    assert len({tuple(v) for v in out.values()}) == 4
    return out


@pytest.fixture(scope="module")
def stock(
    tiny_workload: Workload, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Resolved]]:
    """One engine at its defaults, on one thread, with what it resolved. No test may break it."""
    with make(tiny_workload, tiny_model, tmp_path_factory.mktemp("stock")) as engine:
        yield engine, engine.start()


@pytest.mark.parametrize(
    "knobs",
    [{}, {"cache": "static"}, {"scheduler": "continuous"}, {"replicas": 2, "attention": "eager"}],
    ids=["static", "static-cache", "continuous", "replicas"],
)
def test_uneven_batches_give_the_tokens_of_generate(
    tiny_workload, tiny_model, tmp_path, expected, stock, knobs
) -> None:
    if knobs.get("replicas", 1) > len(os.sched_getaffinity(0)):
        pytest.skip("needs two cores")
    with make(tiny_workload, tiny_model, tmp_path, **knobs) if knobs else nullcontext(stock[0]) as engine:
        resolved = engine.start() if knobs else stock[1]
        assert (resolved.hash == stock[1].hash) == (not knobs)
        assert resolved.config["threads"] == 1
        assert resolved.config["attention"] == knobs.get("attention", "sdpa")
        if "scheduler" not in knobs:
            assert resolved.config["cache"] == ("StaticCache" if "cache" in knobs else "DynamicCache")
        assert resolved.config["dtype"] == "float32"
        assert resolved.config["replicas"] == knobs.get("replicas", 1)
        assert len(engine.pids) == knobs.get("replicas", 1)
        # Different output lengths too: rows leave the batch, the others must not notice.
        requests = [
            GenerateRequest(id=f"r{row}", prompt=prompt, max_tokens=8 - row % 3) for row, prompt in enumerate(expected)
        ]
        for _ in range(2):
            tokens = collect(engine, requests)
            for request in requests:
                assert tokens[request.id] == expected[request.prompt][: request.max_tokens]
        assert engine.peak_memory_bytes() > 100e6


def test_what_was_resolved_identifies_not_what_was_asked_for(tiny_workload, tiny_model, tmp_path, stock) -> None:
    with make(tiny_workload, tiny_model, tmp_path, max_batch=4, attention="sdpa") as engine:
        assert engine.start().hash == stock[1].hash
        assert engine.confinement in ("process", "sandbox")


def test_prompt_lookup_gives_the_same_tokens(tiny_workload, tiny_model, tmp_path, expected) -> None:
    prompt = next(iter(expected))
    with make(tiny_workload, tiny_model, tmp_path, prompt_lookup=3, max_batch=1) as engine:
        assert engine.start().config["prompt_lookup"] == 3
        assert collect(engine, [GenerateRequest(id="a", prompt=prompt, max_tokens=8)])["a"] == expected[prompt]


def test_score_and_profile_and_counts(tiny_model, tmp_path, stock) -> None:
    from transformers import AutoModelForCausalLM

    sequences, (engine, _) = prompts((12, 12, 12)), stock
    engine.score(sequences, 4, tmp_path / "scores.npy")
    scores = np.load(tmp_path / "scores.npy", allow_pickle=False)
    assert scores.shape == (3, 8, 2048)
    assert scores.dtype == np.float32
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        truth = model(torch.tensor(sequences)).logits.log_softmax(-1)[:, 3:-1].numpy()
    assert np.abs(scores - truth).max() < 1e-3
    requests = [GenerateRequest(id=f"p{i}", prompt=tuple(PROMPT), max_tokens=4) for i in range(4)]
    engine.profile(requests, tmp_path / "profile.json")
    assert (tmp_path / "profile.json").stat().st_size > 100
    assert engine.counts() == ()
    engine.reset_counts()
    assert len(collect(engine, requests)) == 4, "it still serves"
    with pytest.raises(InputError):
        engine.score([[1, 2], [1]], 1, tmp_path / "x.npy")


def test_end_of_sequence_counts_only_when_not_exact(tiny_workload, tiny_model, tmp_path, expected) -> None:
    """A model whose generation config calls the third token of a continuation the end."""
    prompt, tokens = next(iter(expected.items()))
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {tokens[2]}}}')
    with make(tiny_workload, folder, tmp_path) as engine:
        engine.start()
        requests = [GenerateRequest(id=str(exact), prompt=prompt, max_tokens=8, exact=exact) for exact in (True, False)]
        found = collect(engine, requests)
    assert found["True"] == tokens
    assert found["False"] == tokens[: tokens.index(tokens[2]) + 1]


def test_killed_while_generating_is_a_crash(tiny_workload, tiny_model, tmp_path) -> None:
    with make(tiny_workload, tiny_model, tmp_path) as engine:
        engine.start()
        engine.submit(GenerateRequest(id="a", prompt=tuple(PROMPT), max_tokens=1500))
        assert next(iter(engine.events(30))).tokens
        os.kill(engine.pids[0], signal.SIGKILL)
        with pytest.raises(EngineFailure) as caught:
            drain(engine)
        assert caught.value.kind == "crash"
        assert "SIGKILL" in caught.value.detail
        with pytest.raises(EngineFailure):
            collect(engine, [GenerateRequest(id="b", prompt=tuple(PROMPT), max_tokens=1)])


def test_stopped_child_is_a_hang_and_can_be_stopped(tiny_workload, tiny_model, tmp_path) -> None:
    engine = make(tiny_workload, tiny_model, tmp_path)
    engine.start()
    pid = engine.pids[0]
    os.kill(pid, signal.SIGSTOP)
    engine.submit(GenerateRequest(id="a", prompt=tuple(PROMPT), max_tokens=4))
    with pytest.raises(EngineFailure) as caught:
        list(engine.events(0.5))
    assert caught.value.kind == "hang"
    engine.stop()
    engine.stop()
    assert not psutil.pid_exists(pid)
    assert list((tmp_path / "children").iterdir()) == []


def test_too_little_memory_is_out_of_memory(tiny_workload, tiny_model, tmp_path) -> None:
    """The process and its libraries fit under the limit, a full batch does not: it is a tensor that cannot be had."""
    many = TrafficSpec(concurrency=256, requests=256, input_tokens=1000, output_tokens=1000)
    large = tiny_workload.model_copy(update={"traffic": many})
    engine = make(large, tiny_model, tmp_path, options={"memory_bytes": 800 << 20}, cache="static")
    with pytest.raises(EngineFailure) as caught:
        engine.start()
    engine.stop()
    assert caught.value.kind == "out_of_memory", caught.value.detail


def test_refusals(tiny_workload, tiny_model, tmp_path, stock) -> None:
    cores = len(os.sched_getaffinity(0))
    for knobs in (
        {"prompt_lookup": 3},
        {"torch_compile": True},
        {"scheduler": "continuous", "cache": "static"},
        {"replicas": cores + 1},
    ):
        with pytest.raises(EngineFailure) as caught, make(tiny_workload, tiny_model, tmp_path, **knobs) as engine:
            engine.start()
        assert caught.value.kind == "refused"
    for knobs in ({"thread": 1}, {"cache": "paged"}, {"replicas": "two"}, {"threads": -1}):
        with pytest.raises(InputError, match=r"engine\.knobs"):
            make(tiny_workload, tiny_model, tmp_path, **knobs)
    with pytest.raises(InputError, match="transformers, sglang"):
        make(tiny_workload, tiny_model, tmp_path, engine="vllm")
    long = tiny_workload.model_copy(update={"traffic": TrafficSpec(input_tokens=2000, output_tokens=100)})
    with pytest.raises(InputError, match="2048"):
        make(long, tiny_model, tmp_path)
    for prompt, count in (((1,) * 2000, 100), ((5000,), 1), ((), 1)):
        with pytest.raises(EngineFailure) as caught:
            stock[0].submit(GenerateRequest(id="a", prompt=prompt, max_tokens=count))
        assert caught.value.kind == "refused"


def test_a_child_outlives_the_thread_that_started_it_but_not_the_process(tiny_model, tmp_path) -> None:
    """The parent is killed with SIGKILL, in the middle of a generation: its child goes too."""
    code = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from profiles.engines import open_engine
from profiles.engines.base import GenerateRequest, Settings, Stack
from profiles.workload import ModelSpec, TrafficSpec, Workload
tmp = Path(sys.argv[2])
work = Workload(name="t", model=ModelSpec(source="random-llama", dtype="float32"), traffic=TrafficSpec(
    input_tokens=4, output_tokens=4, concurrency=1, requests=1))
engine = open_engine(work, Path(sys.argv[1]), Stack(Settings(engine="transformers", knobs={"threads": 1})),
    children=tmp / "children", builds=tmp / "builds", log=tmp / "log")
starter = threading.Thread(target=engine.start)
starter.start(); starter.join()
engine.submit(GenerateRequest(id="a", prompt=(1, 2, 3), max_tokens=2000))
for event in engine.events(30):
    print(engine.pids[0], flush=True)
    break
threading.Event().wait()
"""
    root = str(Path(__file__).parents[1])
    arguments = [sys.executable, "-c", code, str(tiny_model), str(tmp_path), root]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.Process(pid).is_running()
    parent.kill()
    parent.wait()
    gone(pid)
    assert list((tmp_path / "children").glob("*.json")), "a killed parent leaves the pid file"
    assert child.reap(tmp_path / "children") == 0, "there is nothing left to kill"
    assert list((tmp_path / "children").iterdir()) == []


def gone(pid: int) -> None:
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the child outlived its parent"
        time.sleep(0.02)


def test_reap_knows_a_process_by_its_start_time(tmp_path) -> None:
    import json

    leftover = subprocess.Popen(["sleep", "100"], start_new_session=True)
    innocent = subprocess.Popen(["sleep", "100"], start_new_session=True)
    started = child._started(leftover.pid)
    dead_parent = {"parent": 2**22 - 1, "parent_started": 1}
    for name, record in {
        "leftover": {"pid": leftover.pid, "started": started, **dead_parent},
        "reused": {"pid": innocent.pid, "started": 1, **dead_parent},
        "alive": {
            "pid": innocent.pid, "started": child._started(innocent.pid),
            "parent": os.getpid(), "parent_started": child._started(os.getpid()),
        },
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert child.reap(tmp_path) == 1
    assert leftover.wait(timeout=5) == -signal.SIGKILL
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["alive.json"]


def test_rubbish_on_the_line_is_a_crash(tmp_path) -> None:
    import socket
    import struct

    ours, theirs = socket.socketpair()
    channel = child.Channel(ours)
    theirs.sendall(struct.pack(">I", 5) + b"[1,2]")
    with pytest.raises(ValueError, match="not an object"):
        channel.receive()
    theirs.sendall(struct.pack(">I", 1 << 31))
    with pytest.raises(ValueError, match="bytes"):
        channel.receive()
    theirs.close()
    assert channel.receive() is None


def test_knob_specs_hold_their_defaults_and_stock_resolves(tiny_model) -> None:
    for concurrency in (1, 8):
        workload = Workload(
            name="k", model=ModelSpec(source="random-llama"), traffic=TrafficSpec(concurrency=concurrency)
        )
        specs = {spec.name: spec for spec in knob_specs(workload, tiny_model)}
        assert all(spec.default in spec.choices for spec in specs.values())
        assert ("prompt_lookup" in specs) == (concurrency == 1)
    search = {"threads": (1,), "cache": ()}
    chosen = workload.model_copy(update={"engine": workload.engine.model_copy(update={"search": search})})
    specs = {spec.name: spec for spec in knob_specs(chosen, tiny_model)}
    assert specs["threads"].choices == (0, 1)
    assert "cache" not in specs
    chosen = workload.model_copy(update={"engine": workload.engine.model_copy(update={"search": {"thread": (1,)}})})
    with pytest.raises(InputError, match=r"engine\.search\.thread"):
        knob_specs(chosen, tiny_model)


def test_the_hub_package_kernels_is_not_mistaken_for_ours(tmp_path) -> None:
    from transformers.utils import is_kernels_available

    assert not is_kernels_available()


def test_the_environment_of_a_child_is_clean(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    helper = child.spawn("profiles.engines.transformers_worker:main", children=tmp_path, log=tmp_path / "log")
    names = set(Path(f"/proc/{helper.pid}/environ").read_bytes().decode().split("\0"))
    helper.stop()
    keys = {name.split("=")[0] for name in names if name}
    assert "ANTHROPIC_API_KEY" not in keys
    assert {"PATH", "MALLOC_MMAP_THRESHOLD_"} <= keys
