"""A stage that was finished stays finished, whatever the clock says when the run is continued."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
