"""One campaign as a flow of its own: the unit that a person reruns by its id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect import flow, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from flows import artifacts
from flows.terminal import current
from kb.records import Attempt
from kb.store import Store
from kernels.errors import InputError
from kernels.ruler import canaries
from kernels.ruler.floor import Ceilings
from kernels.ruler.lease import device_lease
from kernels.ruler.spec import Problem
from kernels.ruler.verdict import Verdict
from profiles import roofline
from profiles.target import Target
from tasks.agents.offline import OfflineExecutor
from tasks.execute import Concluded, ended, read_campaign, run_campaign
from tasks.judge import Bench
from tasks.lab import Lab
from tasks.record import record_outcome
from tasks.run_state import RunState, list_runs, open_run, read_json
from tasks.workspace import Workspace

CANARIES = 2
"""Known cheats and honest oddities judged beside each campaign that won."""


@task(name="judge", task_run_name="{name}", persist_result=False, cache_policy=NO_CACHE)
def judged(name: str, work: Callable[[], Verdict]) -> Verdict:
    """One judgement of the ruler, to be seen and timed in the UI."""
    return work()


def bench_of(lab: Lab, threads: int) -> Bench:
    """The ruler for this run's campaigns."""
    return _bench(lab.workspace, lab.run, lab.target, threads)


def canaries_of(seed: int) -> Callable[[Bench], Mapping[str, Any]]:
    """Judges a few known candidates beside the campaign; one that comes out wrong voids its win."""

    def check(bench: Bench) -> dict[str, Any]:
        with device_lease(bench.leases, bench.device):
            found = canaries.check(
                canaries.draw(seed, CANARIES), threads=bench.threads, builds=bench.builds, confinement=bench.confinement
            )
        judged = [
            {"name": name, "status": verdict.status, "reason": verdict.reason} for name, verdict in found.verdicts
        ]
        return {"sound": found.ok, "wrong": list(found.wrong), "judged": judged}

    return check


def rerun(workspace: Workspace, campaign_id: str, *, budget_s: float | None = None) -> Concluded:
    """Run one campaign again: what has a settled verdict is reused, the rest is tried again.

    Its outcome enters the knowledge base and the tree is rescored. A campaign that had concluded stays as it is. Where
    it wins now, `roofloop optimize` measures it end to end when that run is continued.

    Raises:
        InputError: no run has such a campaign, or another process is working on that run.
    """
    found = _find(workspace, campaign_id)
    with found.held(), tags(f"run:{found.run_id}"):
        campaign(str(workspace.root), str(workspace.models), found.run_id, campaign_id, budget_s)
    done = ended(found.folder / "campaigns" / campaign_id)
    assert done is not None  # the flow has just written it
    return done


def _find(workspace: Workspace, campaign_id: str) -> RunState:
    for run in list_runs(workspace.runs):
        if (run.folder / "campaigns" / campaign_id / "campaign.json").exists():
            return run
    known = [path.parent.name for path in sorted(workspace.runs.glob("*/campaigns/*/campaign.json"))][-5:]
    raise InputError(
        f"no run of this workspace has the campaign {campaign_id!r}.",
        remedy=f"The newest are: {', '.join(known)}." if known else "There are no campaigns yet.",
        file=workspace.runs,
        key=campaign_id,
    )


def _title() -> str:
    given = flow_run.parameters
    return f"campaign {given['campaign_id']} · again"


@flow(name="campaign", flow_run_name=_title)
def campaign(workspace_root: str, models: str, run_id: str, campaign_id: str, budget_s: float | None = None) -> str:
    """Work on one idea within its budget, have every candidate judged, write down what it came to.

    Args:
        workspace_root: the workspace's folder.
        models: folder of materialised models.
        run_id: the run that planned it.
        campaign_id: its id, the name of its folder in the run.
        budget_s: seconds to spend now; the planned ones when not given.
    """
    workspace = Workspace(Path(workspace_root), Path(models)).create()
    run, store = open_run(workspace.runs / run_id), Store(workspace.kb)
    folder = run.folder / "campaigns" / campaign_id
    one, _ = read_campaign(folder)
    held = read_json(run.stage_file("010-target"))
    if held is None:
        raise InputError("the run has no target yet.", file=run.folder, remedy="Continue it with `roofloop optimize`.")
    target = Target.model_validate(held["result"]["target"])
    display = current()
    title = f"{one.problem.name}, {one.idea.lever}"
    display.begin(title)

    def progress(attempt: Attempt) -> None:
        speed = "" if attempt.speedup is None else f" {attempt.speedup:.2f}×"
        display.detail(f"attempt {attempt.number}: {attempt.status}{speed}")

    done = run_campaign(
        folder,
        store,
        OfflineExecutor(),
        _bench(workspace, run, target, one.threads),
        canaries=canaries_of(run.seed("canaries", campaign_id)),
        budget_s=budget_s,
        progress=progress,
        step=judged,
    )
    record_outcome(store, done.outcome, task=one)
    display.end(title, f"{done.outcome.conclusion.replace('_', ' ')}: {done.outcome.reason}")
    artifacts.campaign_page(run, campaign_id, store)
    return f"{done.outcome.conclusion}: {done.outcome.reason}"


def _bench(workspace: Workspace, run: RunState, target: Target, threads: int) -> Bench:
    def ceilings(problem: Problem) -> Ceilings | None:
        if target.noisy:
            return None
        axes = problem.axis_values(problem.visible[0])
        size = sum(
            eval(cost, {"__builtins__": {}}, axes) for cost in (problem.cost.bytes_read, problem.cost.bytes_written)
        )
        return roofline.ceilings(target, threads, size)

    demanded = run.record.workload.confinement
    return Bench(
        builds=workspace.builds,
        leases=workspace.leases,
        device="cpu",
        threads=threads,
        ceilings=ceilings,
        confinement="best" if demanded in ("none", "process") else demanded,
    )
