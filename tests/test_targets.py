"""Datasheets name the source of each number; this machine is measured once, and not believed when it was noisy."""

import json

import pytest

from kernels.errors import InputError
from profiles import ceilings, probe
from profiles.load import HERE, list_targets, load_target
from profiles.machine import caches, cpus_spread, fingerprint, usable_cpus
from profiles.target import Bandwidth, Flops, Target


def test_datasheets_are_complete_and_every_number_has_its_source():
    assert list_targets() == ("b200", "h200", "mi300x", "mi355x", "trainium2")
    for name in list_targets():
        target = load_target(name)
        assert (target.name, target.origin, target.fingerprint) == (name, "datasheet", "")
        assert {"float32", "bfloat16", "float8"} <= {f.dtype for f in target.flops}
        for flops in target.flops:
            assert target.sources[flops.dtype], (name, flops.dtype)
        assert {"read_gbps", "write_gbps", "copy_gbps", "cache_bytes"} <= set(target.sources)
        memory = next(b for b in target.bandwidths if b.capacity_bytes is None)
        assert memory.level == "hbm"
        # dense, not sparse: no chip of these does more than 850 bf16 operations for a byte from memory
        dense = next(f.gflops for f in target.flops if f.dtype == "bfloat16")
        assert 100 < dense / memory.read_gbps < 400


def test_wrong_targets(tmp_path):
    with pytest.raises(InputError, match="Did you mean 'mi300x'"):
        load_target("mi300")
    with pytest.raises(InputError, match="target measure"):
        load_target("auto")
    text = (HERE / "targets" / "h200.toml").read_text()
    file = tmp_path / "own.toml"
    for old, new, key in (
        ("read_gbps = 4800.0", "read_gbps = -1.0", "bandwidths.0.read_gbps"),
        ("gflops = 66900.0", "gflop = 66900.0", "flops.0.gflop"),
        ('kind = "cuda"', 'kind = "cudda"', "kind"),
    ):
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(InputError) as caught:
            load_target(file)
        assert (caught.value.file, caught.value.key) == (str(file), key)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One real, short measurement of this machine, with what it said on the way."""
    folder, said = tmp_path_factory.mktemp("targets"), []
    target = ceilings.measure_target(folder, progress=said.append, cap_s=3.0)
    return folder, said, target


def test_this_machine_is_measured(measured):
    folder, said, target = measured
    assert any("dram bandwidth" in line for line in said)
    assert said[-1] == ceilings.summary(target)
    assert ("not trusted" in said[-1]) == target.noisy
    assert target.fingerprint == fingerprint()
    assert target.origin == "measured"
    assert target.call_overhead_us > 0
    assert bool(target.noise) == target.noisy
    threads = {b.threads for b in target.bandwidths}
    assert {1, len(usable_cpus())} <= threads
    assert {"float32", "bfloat16"} <= {f.dtype for f in target.flops}
    assert "dram" in {b.level for b in target.bandwidths}
    for row in target.bandwidths:
        assert row.write_gbps is not None
        assert row.copy_gbps is not None
    assert (len(list(folder.glob("*.json"))) == 1) == (not target.noisy)
    assert len(list(folder.glob("*.so"))) == 1


def row(level="dram", read=20.0, threads=2, **more):
    values = {"working_set_bytes": 1 << 28, "write_gbps": 9.0, "copy_gbps": 12.0} | more
    return Bandwidth(level=level, read_gbps=read, threads=threads, **values)


def result(read=20.0, gflops=100.0, noise=""):
    return {
        "bandwidths": [row(read=read).model_dump()],
        "flops": [Flops(dtype="float32", threads=2, gflops=gflops).model_dump()],
        "call_overhead_us": 1.0,
        "noise": noise,
    }


def test_kept_once_and_never_lowered(tmp_path, monkeypatch):
    answers = [
        result(),
        result(read=15.0, gflops=120.0),
        result(read=99.0, noise="other processes used 50% of the CPUs"),
    ]
    monkeypatch.setattr(ceilings, "_run_probe", lambda *_: answers.pop(0))
    monkeypatch.setattr(ceilings, "_compile", lambda cache: cache)
    first = ceilings.measure_target(tmp_path)
    assert ceilings.measure_target(tmp_path) == first
    assert len(answers) == 2
    second = ceilings.measure_target(tmp_path, force=True)
    assert (second.bandwidths[0].read_gbps, second.flops[0].gflops) == (20.0, 120.0)
    noisy = ceilings.measure_target(tmp_path, force=True)
    assert noisy.noisy
    assert "50%" in noisy.noise
    assert ceilings.measure_target(tmp_path) == second  # the noisy one was not kept


def test_a_damaged_or_noisy_file_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(ceilings, "_run_probe", lambda *_: result())
    monkeypatch.setattr(ceilings, "_compile", lambda cache: cache)
    good = ceilings.measure_target(tmp_path)
    file = next(tmp_path.glob("*.json"))
    for damage in ("{", json.dumps({"name": "x"}), good.model_copy(update={"noisy": True}).model_dump_json()):
        file.write_text(damage)
        assert not ceilings.measure_target(tmp_path).noisy
        assert Target.model_validate_json(file.read_text()).bandwidths == good.bandwidths


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no C\\+\\+ compiler"):
        ceilings.measure_target(tmp_path / "cache")


def test_a_dead_probe_is_an_error_not_a_target(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_text("")
    with pytest.raises(RuntimeError, match="measuring this machine failed"):
        ceilings._run_probe(broken, lambda text: None, 1.0)


def test_noise_has_reasons():
    quiet = {"bandwidths": [{"level": "dram", "threads": 2, "relative_spread": 0.02}] * 4, "flops": [], "drift": 0.01}
    assert probe.noise(quiet, 0.01, 0.0) == ""
    assert "other processes used 40%" in probe.noise(quiet, 0.4, 0.0)
    assert "hypervisor took 5%" in probe.noise(quiet, 0.0, 0.05)
    assert "differed by 30%" in probe.noise(quiet | {"drift": 0.3}, 0.0, 0.0)
    unsteady = [{"level": "dram", "threads": 2, "relative_spread": 0.4}] * 4
    assert "4 of 4 ceilings were unsteady" in probe.noise(quiet | {"bandwidths": unsteady}, 0.0, 0.0)


def test_the_best_contender_counts_and_one_fluke_does_not():
    steady = probe.Contender("steady", iter([10.0] * 99).__next__)
    fluke = probe.Contender("fluke", iter([5.0, 30.0, *[5.0] * 99]).__next__)
    slow = probe.Contender("slow", iter([1.0] * 99).__next__)
    best = probe.contest([slow, fluke, steady], budget_s=5.0, finals=15)
    assert best.name == "steady"
    assert best.top == pytest.approx(10.0)


def test_machine():
    cpus = cpus_spread()
    assert sorted(cpus) == sorted(usable_cpus())
    sizes = list(caches(cpus).values())
    assert sizes == sorted(sizes)
    assert probe.thread_counts(6) == [1, 2, 4, 6]
    assert fingerprint() == fingerprint()
