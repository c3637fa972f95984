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
from profiles.ceilings import fingerprint
from profiles.engines.base import EngineFailure, Stack
from profiles.load import check_physics, load_workload
from profiles.workload import Workload
from tasks.codec import from_json
from tasks.lab import Lab, fresh_seed
from tasks.report import write_report
from tasks.run_state import RunState, create_run, open_run, read_json, unfinished_run, with_budget
from tasks.versions import versions
from tasks.workspace import Workspace


def begin(
    workspace: Workspace,
    workload: Workload,
    file: str = "",
    *,
    new: bool = False,
    seed: int | None = None,
    agents: str = "offline",
) -> RunState:
    """The newest unfinished run of this work on this machine, or a new one.

    Args:
        workspace: created.
        workload: what should be fast.
        file: where it was read from; empty when it came by name.
        new: begin a new run in any case.
        seed: of the run; drawn when None. An unfinished run must have the same.
        agents: who plans and executes.
    """
    machine = fingerprint()
    held = None if new else unfinished_run(workspace.runs, workload, machine, seed)
    if held is not None:
        return with_budget(held, workload)
    return create_run(
        workspace.runs,
        workload,
        seed=fresh_seed() if seed is None else seed,
        fingerprint=machine,
        agents=agents,
        workload_file=file,
        versions=versions(),
    )


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
            optimize(state.record.workload.name, str(workspace.root), str(workspace.models), state.run_id)
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
    return f"optimize {flow_run.parameters['workload']} · {datetime.now(UTC):%Y-%m-%d}"


@flow(name="optimize", flow_run_name=_name, retries=0)
def optimize(workload: str, workspace_root: str = ".", models: str = "", run_id: str = "") -> dict[str, Any]:
    """Make a model fast on this machine, and prove it.

    Args:
        workload: name of a workload, or the path of its TOML.
        workspace_root: the workspace's folder.
        models: folder of materialised models; the person's cache when empty.
        run_id: the run to go on with; when empty, the newest unfinished run of the workload, else a new one.
    """
    workspace = Workspace(Path(workspace_root), *([Path(models)] if models else [])).create()
    if not run_id:
        run = begin(workspace, load_workload(workload), workload if workload.endswith(".toml") else "")
        with run.held():
            start(workspace, run)
        return {"run_id": run.run_id, "report": str(run.folder / "report.html")}
    run = open_run(workspace.runs / run_id)
    current().clock(run.clock)
    store = Store(workspace.kb)
    lessons.seed(store)
    model_dir = steps.model(workspace, run)
    target = steps.target(workspace, run)
    lab = Lab(workspace, run, model_dir, target)
    check_physics(run.record.workload, model_dir, target, run.record.workload_file or None)
    with lab.reference() as reference:
        steps.bring_up(lab, reference)
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
    stack = from_json(Stack, final["stack"])
    steps.profile_after(lab, stack, plan.profiles.get(stack.id), reserve_s=5.0)
    artifacts.run_page(run, store)
    return {"run_id": run_id, "stop": stop, "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _why_ended(state: RunState) -> str:
    final = read_json(state.stage_file("900-final")) or {}
    return str(final["result"]["stop_reason"])
