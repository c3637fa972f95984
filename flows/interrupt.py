"""Ctrl-C and TERM end a run at once; runs that died otherwise are not shown as running for ever.

What is on disk is whole at any moment, so an interrupted process needs no clearing up but its children; its locks are
the kernel's. Waiting for the threads of campaigns would take as long as their measurements.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

import psutil

from tasks.run_state import RunState

PATIENCE_S = 5
"""Seconds that telling the server may take."""


@contextlib.contextmanager
def interruptible(run: RunState, say: Callable[[str], None]) -> Iterator[None]:
    """Within the block, SIGINT and SIGTERM mark the run as interrupted, tell the server and end the process (130)."""

    def leave(number: int, _: object) -> None:
        signal.signal(signal.SIGALRM, lambda *_: _end(children()))
        signal.alarm(PATIENCE_S)
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            run.clock.save()
            run.with_status("interrupted", f"{name}: the same command goes on with it")
            run.event("interrupted", signal=name)
        with contextlib.suppress(OSError, ValueError):
            say("roofloop: interrupted; the same command goes on where it stopped")
        with contextlib.suppress(Exception):  # it may be gone; the next command ends what is left there
            end_zombies(run.run_id, "CANCELLED", f"interrupted by {name}")
        _end(children())

    before = [(number, signal.signal(number, leave)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def children() -> list[int]:
    """Pids of all that this process started; the Prefect server and its keeper are not among them (others use it)."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "flows.keeper" not in child.cmdline():
                found += [*(below.pid for below in child.children(recursive=True)), child.pid]
    return found


def _end(victims: list[int]) -> NoReturn:
    """Kill them and this process in one go: no thread here gets to see, and write down, that its child died."""
    for pid in victims:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    os._exit(130)


def end_zombies(run_id: str, state: str, message: str) -> int:
    """Set what the server still shows as running of this run to `state`; returns how many rows.

    To be called by who holds the run (`RunState.held`): nothing else can then be working on it.

    Args:
        run_id: the run; its flow runs have the tag `run:<run_id>`.
        state: `CRASHED` or `CANCELLED`.
        message: why, for the UI.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterId,
        FlowRunFilterTags,
        TaskRunFilter,
        TaskRunFilterState,
        TaskRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.states import State

    ended = State(type=StateType(state), message=message)
    live = [StateType.RUNNING, StateType.PENDING]
    count = 0
    with get_client(sync_client=True) as client:
        tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{run_id}"]))
        runs = client.read_flow_runs(flow_run_filter=tagged)
        ids = FlowRunFilter(id=FlowRunFilterId(any_=[run.id for run in runs]))
        running = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=live)))
        for row in client.read_task_runs(flow_run_filter=ids, task_run_filter=running) if runs else ():
            client.set_task_run_state(row.id, ended, force=True)
            count += 1
        for flow_run in runs:
            if flow_run.state is not None and flow_run.state.type in live:
                client.set_flow_run_state(flow_run.id, ended, force=True)
                count += 1
    return count
