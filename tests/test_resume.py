"""What is finished stays finished when a run is continued; Ctrl-C ends one at once and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from test_loop import TARGET, WORKLOAD, begin, ours, stages

from flows import server
from tasks.workspace import Workspace

ROOT = Path(__file__).resolve().parent.parent

CONTINUED = """
import json, sys
from pathlib import Path
from flows import server
from kb.store import Store
from profiles.load import load_workload
from tasks.run_state import create_run
from tasks.workspace import Workspace

place = Workspace(Path(sys.argv[1])).create()
with server.serving(place):
    from flows import steps
    from tasks.lab import Lab, stock
    workload = load_workload("tiny-cpu")
    run = create_run(place.runs, workload, seed=1, fingerprint="here")
    lab = Lab(place, run, place.models, None)
    for reason in ("budget: 57 s are left", "budget: 41 s are left"):
        steps.final(lab, Store(place.kb), None, None, stock(workload), reason)
        print(json.loads(run.stage_file("900-final").read_text())["result"]["stop_reason"])
"""


def test_the_final_confirmation_is_not_repeated_when_the_budget_left_has_changed(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CONTINUED, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["budget: 57 s are left"] * 2


def test_ctrl_c_ends_a_run_at_once_and_the_server_does_not_show_it_as_running(tmp_path: Path) -> None:
    (tmp_path / "target.toml").write_text(TARGET)
    (tmp_path / "killed.toml").write_text(WORKLOAD.format(target=tmp_path / "target.toml"))
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | {"PYTHONPATH": str(ROOT)}
    keeping = subprocess.Popen(
        [sys.executable, "-m", "flows", "serve"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    )
    try:
        assert keeping.stdout is not None
        keeping.stdout.readline()
        running = server.find(Workspace(tmp_path))
        assert running is not None
        run = begin(tmp_path)
        while not stages(tmp_path) and run.poll() is None:
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
        assert run.returncode == 130, said
        assert b"goes on where it stopped" in said
        assert b"Traceback" not in said
        assert json.loads(next(tmp_path.glob("runs/*/run.json")).read_text())["status"] == "interrupted"
        assert states(running.api_url) == {"CANCELLED"}
        assert server.healthy(running.api_url)  # it was not ours alone
    finally:
        keeping.terminate()
        keeping.wait()
    end = time.monotonic() + 30
    while ours(tmp_path) and time.monotonic() < end:
        time.sleep(0.2)
    assert ours(tmp_path) == []


def states(api_url: str) -> set[str]:
    asked = urllib.request.Request(
        f"{api_url}/flow_runs/filter", data=b"{}", headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return {run["state"]["type"] for run in json.load(answer)}
