"""The whole loop for real: killed with SIGKILL at a random point and continued by the same command."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

WORKLOAD = """
schema_version = 1
name = "killed"
target = "{target}"
[model]
source = "random-llama"
[traffic]
concurrency = 4
input_tokens = 16
output_tokens = 16
requests = 4
[budget]
wall = "8m"
settings_trials = 2
campaigns = 1
campaign = "10s"
parallel = 1
"""

QUERY = "SELECT count(*) AS n, count(DISTINCT campaign_id) AS d FROM outcomes"

TARGET = """
schema_version = 1
name = "this-machine"
kind = "cpu"
device = "a CPU"
origin = "datasheet"
[[bandwidths]]
level = "dram"
working_set_bytes = 1000000000
threads = 1
read_gbps = 60.0
[[flops]]
dtype = "bfloat16"
threads = 1
gflops = 500.0
[[flops]]
dtype = "float32"
threads = 1
gflops = 250.0
[sources]
bandwidths = "made up for a test: generous, so that no floor refuses anything"
flops = "made up for a test"
"""


def begin(workspace: Path) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "flows", "optimize", str(workspace / "killed.toml"), "--seed", "7"],
        cwd=workspace, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def ours(workspace: Path) -> list[psutil.Process]:
    """Processes that anything of this workspace has started, the server apart from it included."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline()) + " ".join(f.path for f in process.open_files())
            if str(workspace) in words + str(process.cwd()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if process.pid != os.getpid()]


def stages(workspace: Path) -> dict[str, dict[str, object]]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(workspace.glob("runs/*/stages/*.json"))}


def wait_for_stages(workspace: Path, process: subprocess.Popen[bytes], count: int) -> None:
    end = time.monotonic() + 240
    while len(stages(workspace)) < count and time.monotonic() < end:
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        time.sleep(0.1)


def kill_tree(process: subprocess.Popen[bytes], workspace: Path) -> None:
    for victim in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()
    end = time.monotonic() + 60
    while ours(workspace) and time.monotonic() < end:
        time.sleep(0.3)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "target.toml").write_text(TARGET)
    (tmp_path / "killed.toml").write_text(WORKLOAD.format(target=tmp_path / "target.toml"))
    return tmp_path


def check_killed_and_continued(workspace: Path, seed: int) -> None:
    print(f"kill points drawn with seed {seed}")
    draw = random.Random(seed)
    point = draw.randint(1, 7)
    first = begin(workspace)
    wait_for_stages(workspace, first, point)
    time.sleep(draw.uniform(0, 4))
    before = stages(workspace)
    if first.poll() is None:
        kill_tree(first, workspace)
    assert ours(workspace) == []  # no orphan

    second = begin(workspace)
    _, said = second.communicate(timeout=400)
    text = said.decode()
    assert second.returncode == 0, text
    assert "Traceback" not in text
    after = stages(workspace)
    assert len(list((workspace / "runs").iterdir())) == 1
    for name, stage in before.items():
        assert after[name] == stage, f"{name} was done again"
    run = next((workspace / "runs").iterdir())
    report = json.loads((run / "report.json").read_text())
    assert report["status"] == "finished"
    assert (run / "report.html").stat().st_size > 10_000
    trials = [trial["number"] for trial in report["trials"]]
    assert trials == sorted(set(trials))  # none was counted twice
    for campaign in run.glob("campaigns/*"):
        numbers = [json.loads(file.read_text())["number"] for file in campaign.glob("attempts/*.json")]
        assert len(numbers) == len(set(numbers))
    assert ours(workspace) == []

    counted = subprocess.run(
        [sys.executable, "-m", "flows", "kb", "sql", QUERY,
         "--json"],
        cwd=workspace, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = json.loads(counted.stdout)
    assert rows[0]["n"] == rows[0]["d"] == len(report["campaigns"])


@pytest.mark.timeout(800)
def test_the_loop_survives_a_kill_at_a_random_point(workspace: Path) -> None:
    check_killed_and_continued(workspace, random.SystemRandom().randrange(10**6))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_the_loop_survives_kills_all_over(workspace: Path, seed: int) -> None:
    check_killed_and_continued(workspace, seed)


def test_a_finished_run_is_not_gone_on_with(workspace: Path) -> None:
    # what is finished stays: the same command begins another run
    run = workspace / "runs" / "killed-20260101-000000-abcd"
    shutil.rmtree(run, ignore_errors=True)
    from profiles.ceilings import fingerprint
    from profiles.load import load_workload
    from tasks import run_state

    loaded = load_workload(str(workspace / "killed.toml"))
    machine = fingerprint()
    state = run_state.create_run(workspace / "runs", loaded, seed=1, fingerprint=machine)
    assert run_state.unfinished_run(workspace / "runs", loaded, machine, None) is not None
    state.with_status("finished")
    assert run_state.unfinished_run(workspace / "runs", loaded, machine, None) is None
