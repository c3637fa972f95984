"""The loop: bring-up, baseline, settings, rounds of campaigns, confirmation, report. What a person starts and reruns.

Each step is a stage: done once, kept in the run's folder, a task in the Prefect UI. A run that was killed goes on from
the first stage that is not finished.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow, tags
from prefect.runtime import flow_run

from flows import artifacts, rounds, steps
from flows.terminal import current
from kb import lessons
from kb.store import Store
from kernels.errors import InputError
from profiles.engines.base import EngineFailure, Stack
from tasks.codec import from_json
from tasks.lab import Lab
from tasks.report import write_report
from tasks.run_state import RunState, open_run
from tasks.workspace import Workspace


def start(workspace: Workspace, state: RunState) -> RunState:
    """Run the loop, or go on with it, and write the report.

    Args:
        workspace: created.
        state: the run, held by the caller.

    Returns:
        The run with its final status: `finished`, or `failed` with the reason.

    Raises:
        InputError: the workload cannot run on this machine as it is written.
    """
    display = current()
    display.clock(state.clock)
    state = state.with_status("running")
    state.event("started", budget_s=state.clock.budget_s)
    try:
        with tags(f"workload:{state.record.workload.name}", f"run:{state.run_id}"):
            optimize(str(workspace.root), str(workspace.models), state.run_id)
        state = state.with_status("finished", _why_ended(state))
    except EngineFailure as failure:
        state = state.with_status("failed", str(failure))
    except InputError as error:
        state = state.with_status("failed", str(error))
        raise
    except BaseException:
        state.clock.save()
        state.with_status("interrupted", "the run was interrupted; the same command goes on with it")
        raise
    finally:
        state.clock.save()
        state.event("ended")
    write_report(state.folder, Store(workspace.kb))
    return state


def _name() -> str:
    run_id = str(flow_run.parameters["run_id"])
    return f"optimize {run_id.rsplit('-', 3)[0]} · {datetime.now(UTC):%Y-%m-%d}"


@flow(name="optimize", flow_run_name=_name, retries=0)
def optimize(workspace_root: str, models: str, run_id: str) -> dict[str, Any]:
    """Make a model fast on this machine, and prove it.

    Args:
        workspace_root: the workspace's folder.
        models: folder of materialised models.
        run_id: the run to begin or to go on with.
    """
    workspace = Workspace(Path(workspace_root), Path(models)).create()
    run = open_run(workspace.runs / run_id)
    current().clock(run.clock)
    store = Store(workspace.kb)
    lessons.seed(store)
    model_dir = steps.model(workspace, run)
    target = steps.target(workspace, run)
    lab = Lab(workspace, run, model_dir, target)
    steps.bring_up(lab)
    with lab.reference() as reference:
        baseline = steps.baseline(lab, reference)
        found = steps.settings(lab, store, reference, baseline)
        plan = rounds.Course(lab, store, reference, baseline, Stack(found.best), rounds.costs(baseline))
        stop = ""
        number = 1
        while not stop:
            stop = rounds.run_round(plan, number)
            artifacts.run_page(run, store)
            number += 1
        final = steps.final(lab, store, reference, baseline, plan.stack, stop)
    steps.profile_after(lab, from_json(Stack, final["stack"]), reserve_s=5.0)
    artifacts.run_page(run, store)
    return {"run_id": run_id, "stop": stop, "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _why_ended(state: RunState) -> str:
    import json

    final = json.loads(state.stage_file("900-final").read_text(encoding="utf-8"))
    return str(final["result"]["stop_reason"])
