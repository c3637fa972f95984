"""The workspace's Prefect server: found, shared, gone with its last user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from flows import server
from tasks.workspace import Workspace

ROOT = Path(__file__).resolve().parent.parent
USER = """
import sys, time
from pathlib import Path
from flows import server
from tasks.workspace import Workspace
with server.serving(Workspace(Path(sys.argv[1])).create()) as running:
    print(running.api_url, running.pid, running.keeper, flush=True)
    time.sleep(600)
"""


def user(root: Path) -> tuple[subprocess.Popen[str], list[str]]:
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(root)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def gone(pid: int, patience_s: float = 60) -> bool:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.2)
    return False


def serve(root: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows", "serve"], cwd=root, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509 - as in a background job
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Prefect UI  http://127.0.0.1:")
    return process


def test_users_share_one_server_that_ends_with_the_last_however_it_dies(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).create()
    one, first = user(tmp_path)
    two, second = user(tmp_path)
    three = None
    try:
        assert first == second  # the same server
        assert server.healthy(first[0])
        three = serve(tmp_path)
        found = server.find(workspace)
        assert found is not None
        assert (found.api_url, str(found.pid)) == (first[0], first[1])
        one.kill()
        one.wait()
        three.send_signal(signal.SIGINT)
        out, err = three.communicate(timeout=60)
        assert (three.returncode, err) == (0, "")
        assert "stopped" in out
        assert server.healthy(first[0])  # one user is left
        two.kill()
        two.wait()
        assert gone(int(first[1]))
        assert gone(int(first[2]))
    finally:
        for process in (one, two, three):
            if process is not None:
                process.kill()
                process.wait()
    assert server.find(workspace) is None

    # The same workspace again; this time the keeper dies, and the server with it.
    four = serve(tmp_path)
    try:
        again = server.find(workspace)
        assert again is not None
        assert again.keeper is not None
        assert again.pid != found.pid
        os.kill(again.keeper, signal.SIGKILL)
        assert gone(again.pid or 0)
        _, err = four.communicate(timeout=30)  # `serve` does not wait for a server that is no more
        assert four.returncode == 1
        assert "ended by itself" in err
        assert "Traceback" not in err
    finally:
        four.kill()
        four.wait()
    assert server.find(workspace) is None


def test_a_record_that_nothing_stands_behind_is_no_server(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).create()
    record = workspace.prefect / "server.json"
    record.write_text('{"api_url": "http://127.0.0.1:9/api", "ui_url": "x", "pid": 1, "pid_started": 1.0}')
    assert server.find(workspace) is None
    record.write_text("not json")
    assert server.find(workspace) is None


def test_prefect_home_is_nobody_elses(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).create()
    assert workspace.prefect.stat().st_mode & 0o777 == 0o700


def test_the_recorder_does_not_spin() -> None:
    # the server takes the whole part of it: below 1 it would flush without a pause
    assert float(server.SETTINGS["PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL"]) >= 1
