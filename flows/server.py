"""The Prefect server of a workspace: found when it runs, started when it does not, gone when nobody uses it.

Prefect itself is imported only after `serving` has set the environment: it reads its settings at import. In its
ephemeral mode Prefect loses task runs, so there is always a real server.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from kernels.errors import InputError
from tasks.workspace import Workspace

SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",  # whole seconds: 0.25 becomes 0 and spins
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_CLIENT_MAX_RETRIES": "10",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}
"""The settings of prefect.toml as environment variables: that file is read from the working directory only."""

START_TRIES = 3
START_S = 120.0


class ServerFailed(Exception):
    """The Prefect server did not come up; the message says where its log is."""


@dataclass(frozen=True)
class Server:
    """A running Prefect server."""

    api_url: str
    ui_url: str
    pid: int | None = None
    """None for a server that is not this workspace's."""
    pid_started: float | None = None
    """Start time of that process, so that a reused pid is not taken for it."""
    keeper: int | None = None
    log: str = ""


def environment(workspace: Workspace, api_url: str) -> dict[str, str]:
    """What a process needs in its environment to talk to this server, whatever its working directory."""
    return SETTINGS | {"PREFECT_HOME": str(workspace.prefect), "PREFECT_API_URL": api_url}


def healthy(api_url: str, timeout_s: float = 5.0) -> bool:
    """Whether a Prefect server answers there."""
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=timeout_s) as answer:
            return answer.status == 200 and answer.read().strip() == b"true"
    except (OSError, urllib.error.URLError, ValueError):
        return False


def find(workspace: Workspace) -> Server | None:
    """The workspace's running server; a record that nothing stands behind is removed."""
    file = _record(workspace)
    try:
        server = Server(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None
    if _alive(server.pid, server.pid_started) and healthy(server.api_url):
        return server
    return None


@contextlib.contextmanager
def serving(workspace: Workspace, progress: Callable[[str], None] = lambda _: None) -> Iterator[Server]:
    """Use the server that PREFECT_API_URL names, or the workspace's, starting it when there is none.

    Sets the environment, so it comes before the first import of Prefect. The server that is started here stays for as
    long as any command of this workspace is in such a block, and ends with the last.

    Raises:
        InputError: PREFECT_API_URL names a server that does not answer.
        ServerFailed: a server could not be started.
    """
    given = os.environ.get("PREFECT_API_URL")
    held = find(workspace)
    if given and not (held and held.api_url == given):
        if not healthy(given):
            raise InputError(
                f"no Prefect server answers at {given}.",
                key="PREFECT_API_URL",
                remedy="Start that server, or unset the variable: Roofloop then starts one of its own.",
            )
        os.environ.update({**SETTINGS, "PREFECT_HOME": os.environ.get("PREFECT_HOME", str(workspace.prefect))})
        yield Server(given, given.removesuffix("/api"))
        return
    with _users(workspace).open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        server = _join_or_start(workspace, progress)
        before = {name: os.environ.get(name) for name in environment(workspace, server.api_url)}
        os.environ.update(environment(workspace, server.api_url))
        try:
            yield server
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def stop(workspace: Workspace, patience_s: float = 20.0) -> bool:
    """Stop the workspace's server, whoever uses it; False when there is none."""
    server = find(workspace)
    if server is None or server.pid is None:
        return False
    victims = [pid for pid in (server.keeper, server.pid) if pid]
    processes = [psutil.Process(pid) for pid in victims if psutil.pid_exists(pid)]
    for process in processes[:1]:
        process.terminate()
    _, left = psutil.wait_procs(processes, timeout=patience_s)
    for process in left:
        process.kill()
    _record(workspace).unlink(missing_ok=True)
    return True


def _record(workspace: Workspace) -> Path:
    return workspace.prefect / "server.json"


def _users(workspace: Workspace) -> Path:
    return workspace.prefect / "server.users"


def _alive(pid: int | None, started: float | None) -> bool:
    try:
        process = psutil.Process(pid or -1)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - (started or 0.0)) < 1.0
    except (psutil.NoSuchProcess, ValueError):
        return False


def _join_or_start(workspace: Workspace, progress: Callable[[str], None]) -> Server:
    with (workspace.prefect / "server.starting").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = find(workspace)
        if found:
            return found
        _record(workspace).unlink(missing_ok=True)
        progress("starting the Prefect server")
        why = ""
        for _ in range(START_TRIES):
            log = workspace.logs / "prefect-server.log"
            try:
                return _start(workspace, log)
            except ServerFailed as error:
                why = str(error)
        raise ServerFailed(why)


def _start(workspace: Workspace, log: Path) -> Server:
    with (
        socket.socket() as probe
    ):  # a port that was free a moment ago; when it is taken since, the next try has another
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    api_url = f"http://127.0.0.1:{port}/api"
    serve = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")} | environment(workspace, api_url)
    env["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    with log.open("ab") as output:
        keeper = _spawn(
            ["-m", "flows.keeper", str(_record(workspace)), str(_users(workspace)), sys.executable, *serve],
            env,
            output,
            workspace.prefect,
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if keeper.poll() is not None:
            break
        if healthy(api_url, timeout_s=2.0):
            child = psutil.Process(keeper.pid).children()[0]
            server = Server(api_url, api_url.removesuffix("/api"), child.pid, child.create_time(), keeper.pid, str(log))
            temporary = _record(workspace).with_suffix(".tmp")
            temporary.write_text(json.dumps(asdict(server)), encoding="utf-8")
            temporary.replace(_record(workspace))
            return server
        time.sleep(0.2)
    keeper.terminate()
    keeper.wait()
    raise ServerFailed(f"the Prefect server did not start; its log is {log}")


def _spawn(command: list[str], env: dict[str, str], output: IO[bytes], cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
