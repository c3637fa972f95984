"""Step 0 alone: the best settings of the engine under the workload's gates, without campaigns."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow, tags
from prefect.runtime import flow_run

from flows import steps
from flows.terminal import current
from kb.store import Store
from profiles.engines.base import EngineFailure, Stack
from profiles.load import check_physics
from tasks.lab import Lab
from tasks.report import write_report
from tasks.run_state import RunState, open_run
from tasks.workspace import Workspace

REASON = "only the settings were searched"


def start(workspace: Workspace, state: RunState) -> RunState:
    """Search the settings, confirm the best in fresh engines, and write the report.

    Raises:
        InputError: the workload cannot run on this machine as it is written.
    """
    current().clock(state.clock)
    state = state.with_status("running")
    try:
        with tags(f"workload:{state.record.workload.name}", f"run:{state.run_id}"):
            settings(str(workspace.root), str(workspace.models), state.run_id)
        state = state.with_status("finished", REASON)
    except EngineFailure as failure:
        state = state.with_status("failed", str(failure))
    except BaseException as error:
        state.with_status("interrupted", f"{type(error).__name__}: the same command goes on with it")
        raise
    finally:
        state.clock.save()
    write_report(state.folder, Store(workspace.kb))
    return state


def _name() -> str:
    return f"settings {str(flow_run.parameters['run_id']).rsplit('-', 3)[0]} · {datetime.now(UTC):%Y-%m-%d}"


@flow(name="settings", flow_run_name=_name)
def settings(workspace_root: str, models: str, run_id: str) -> dict[str, Any]:
    """Search the engine's settings for a workload.

    Args:
        workspace_root: the workspace's folder.
        models: folder of materialised models.
        run_id: the run to begin or to go on with.
    """
    workspace = Workspace(Path(workspace_root), Path(models)).create()
    run, store = open_run(workspace.runs / run_id), Store(workspace.kb)
    lab = Lab(workspace, run, steps.model(workspace, run), steps.target(workspace, run))
    check_physics(lab.workload, lab.model_dir, lab.target, run.record.workload_file or None)
    with lab.reference() as reference:
        steps.bring_up(lab, reference)
        baseline = steps.baseline(lab, reference)
        found = steps.settings(lab, store, reference, baseline)
        steps.final(lab, store, reference, baseline, Stack(found.best), REASON)
    return {"run_id": run_id, "best": found.best.model_dump(mode="json"), "reason": found.reason}
