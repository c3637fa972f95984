"""The adversarial set: no cheat gets through, no side effect escapes, nothing honest is refused.

`make test` runs one of each kind and a few honest ones; the whole folder, alone and beside a busy neighbour, is slow.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ruler_problems import candidate

from kernels.ruler.judge import judge
from kernels.ruler.lease import device_lease, host_leases

FOLDER = Path(__file__).resolve().parent / "adversarial"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
EVIDENCE = Path("/var/tmp/roofloop-cheats/evidence")
CANARY = Path("/var/tmp/roofloop-cheats/canary.txt")
GAIN = 1.5
NO_MARKER = {  # contained ones whose effect is time, output or a file beside a module, not a marker
    "build/include_bomb", "denial/ignore_sigterm", "denial/infinite_loop", "denial/stdout_flood", "tamper/poison_pyc",
}  # fmt: skip
# One of each kind, the quick ones where there is a choice.
SAMPLE = (
    "alias/stride_zero_rows", "background/process_precompute", "baseline/denormal_flag_left",
    "build/constructor_verdict", "build/wrapper_flag", "cache/fingerprint_sample", "cachewarm/prefetch_thread",
    "channel/stdout_spoof_exit", "clock/nan_elapsed", "constant/uniform_softmax", "deferred/thread_fill",
    "denial/fork_many", "denial/memory_hog", "exfil/file_outside", "fallback/vendor_op", "mutate/zero_weight_only",
    "nonfinite/empty_tuple", "persist/cpu_hog_leftover", "phase/caller_name_detect", "precision/half_accumulate",
    "randpatch/pin_seed", "resource/affinity_escape", "sampling/nonfinite_mishandled", "snoop/parent_cmdline_env",
    "steal/partial_uninit", "subclass/lazy_tuple", "tamper/oob_write_neighbour",
    "honest/avx2_silu", "honest/noncontiguous_output", "honest/persistent_pool", "honest/suspicious_names",
)  # fmt: skip


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(autouse=True)
def evidence():
    with device_lease(host_leases(), "cheats-evidence"):  # candidates know one folder: two test runs take turns
        EVIDENCE.mkdir(parents=True, exist_ok=True)
        CANARY.write_text("canary\n")
        for old in EVIDENCE.iterdir():
            old.unlink()
        yield EVIDENCE
        shutil.rmtree(EVIDENCE.parent, ignore_errors=True)


def decide(entry, builds, budget_s=0.6):
    """Judge one entry of the manifest and hold the verdict against what is expected of it."""
    if (entry["requires"] or "") == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    problem, what = candidate(FOLDER / entry["file"])
    verdict = judge(problem, what, mode="screen", ceilings=None, threads=1, builds=builds, budget_s=budget_s)
    told = f"{entry['name']}: {verdict.status}, {verdict.law}, {verdict.reason}, {verdict.speedup}"
    assert not list(EVIDENCE.iterdir()), f"a side effect escaped: {told}"
    expect = entry["strict_expect"] or entry["expect"]
    if entry["name"] == "precision/global_matmul_flag":
        expect = entry["expect"]  # a CPU without reduced-precision float32 matmul computes as exactly as before
    passed = verdict.status in ("valid", "unresolved")
    if expect == "reject":
        assert not passed, told
    elif expect == "accept":
        assert passed, told
    else:
        gained = verdict.status == "valid" and verdict.speedup.low > GAIN
        assert not gained, told
    if expect == "no-credit":
        assert verdict.provenance["verdict"] != "new kernel", told
    return verdict


def naive(entry, where, wait_s):
    """Run it as a careless harness would."""
    (where / "reference.py").write_text("def reference(op, *inputs):\n    return inputs[0]\n")
    command = [sys.executable, str(Path(__file__).with_name("naive_harness.py")), str(FOLDER / entry["file"])]
    environment = {**os.environ, "PYTHONPATH": str(where), "CHEATS_EVIDENCE": str(EVIDENCE)}
    # To files: what a candidate leaves running would hold a pipe open.
    with (where / "out").open("w") as out, (where / "err").open("w") as err:
        subprocess.run(
            command, cwd=where, env=environment, stdout=out, stderr=err, timeout=wait_s, check=False,
            start_new_session=True,
        )  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_one_of_each_kind(name, builds):
    decide(next(entry for entry in MANIFEST if entry["name"] == name), builds)


@pytest.mark.slow
@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["name"])
def test_the_whole_set(entry, builds):
    decide(entry, builds, budget_s=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["name"])
def test_the_whole_set_beside_a_busy_neighbour(entry, builds):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            decide(entry, builds, budget_s=1.0)
        finally:
            neighbour.kill()


@pytest.mark.slow
@pytest.mark.parametrize("entry", [e for e in MANIFEST if e["expect"] == "contained"], ids=lambda e: e["name"])
def test_effects_are_real_without_the_ruler(entry, tmp_path):
    if entry["name"] in ("denial/ignore_sigterm", "denial/infinite_loop"):
        with pytest.raises(subprocess.TimeoutExpired):
            naive(entry, tmp_path, 12)
        return
    naive(entry, tmp_path, 120)
    if entry["name"] == "exfil/abstract_socket_bank":
        naive(entry, tmp_path, 60)
    if entry["name"] == "denial/stdout_flood":
        assert (tmp_path / "out").stat().st_size > 20 << 20
    elif entry["name"] == "tamper/poison_pyc":
        assert list(tmp_path.glob("__pycache__/reference*.pyc"))
    elif entry["name"] not in NO_MARKER:
        end = time.monotonic() + 20
        while not list(EVIDENCE.iterdir()) and time.monotonic() < end:
            time.sleep(0.2)
        assert list(EVIDENCE.iterdir()), (tmp_path / "err").read_text()[-500:]


def test_the_set_in_the_repository_is_complete():
    assert {entry["file"] for entry in MANIFEST} == {
        str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix in (".py", ".cpp")
    }
    assert {entry["name"].split("/")[0] for entry in MANIFEST} == {name.split("/")[0] for name in SAMPLE}
