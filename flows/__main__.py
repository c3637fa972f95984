"""The command line: `roofloop optimize | settings | judge | status | report | rerun | ideas | kb | target | doctor …`.

Nothing heavy is imported before it is needed: Prefect reads its settings when it is imported, and help must be quick.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows import cli_judge, cli_look
from flows.cli_common import (
    UNSET,
    JsonOption,
    RunFailed,
    WorkspaceOption,
    complain,
    exit_code,
    open_workspace,
    print_json,
    quiet,
    served,
)
from kernels.errors import InputError

if TYPE_CHECKING:
    from flows.terminal import Display, Streams
    from profiles.workload import Workload
    from tasks.run_state import RunState
    from tasks.workspace import Workspace

LEAST_FREE_BYTES = 1 << 30

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
WorkloadArgument = Annotated[str, typer.Argument(help="A workload's name (profiles/workloads/) or the path of a TOML.")]
BudgetOption = Annotated[str, typer.Option(help="Time for the whole run, such as 10m; in place of the workload's.")]
NewOption = Annotated[bool, typer.Option("--new", help="Begin a new run, even where one is unfinished.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Seed of the run; drawn when not given.")]


def main() -> None:
    """Run the command line and exit: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a background job was started with SIGINT ignored
        signal.signal(number, _interrupt)
    try:
        returned = app(prog_name="roofloop", standalone_mode=False)  # the code of a `typer.Exit`, not raised then
        code = returned if isinstance(returned, int) else 0
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted; the same command goes on where it stopped")
        code = 130
    except Exception as error:
        code = exit_code(error)
    sys.exit(code)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@app.callback()
def roofloop(
    workspace: Annotated[
        Path | None, typer.Option(help="Folder that holds runs/ and .roofloop/.", show_default="this folder")
    ] = None,
) -> None:
    """Make a given model run as fast as this machine allows, and prove it.

    Begin with: roofloop optimize smollm2-cpu

    Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted (the same command goes on).
    """


@app.command()
def optimize(  # noqa: PLR0917
    workload: WorkloadArgument,
    budget: BudgetOption = "",
    new: NewOption = False,
    seed: SeedOption = None,
    agents: Annotated[str, typer.Option(help="offline (search and templates) or claude.")] = "offline",
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Run the whole loop for a workload, or go on with its newest unfinished run, and write the report."""
    _check_agents(agents)
    _run("flows.optimize", workload, budget=budget, new=new, seed=seed, as_json=as_json, root=workspace, agents=agents)


@app.command()
def settings(
    workload: WorkloadArgument,
    budget: BudgetOption = "",
    seed: SeedOption = None,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Step 0 alone: search the engine's settings under the workload's gates, in a run of its own."""
    _run("flows.settings", workload, budget=budget, new=True, seed=seed, as_json=as_json, root=workspace)


@app.command()
def rerun(
    campaign: Annotated[str, typer.Argument(help="A campaign's id, as the report and the UI show it.")],
    changed: Annotated[list[str] | None, typer.Option("--with", metavar="KEY=VALUE", help="budget=2m")] = None,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Run one campaign again; settled attempts are reused, the others tried again."""
    from profiles.load import parse_duration

    budget_s = None
    for item in changed or ():
        key, _, value = item.partition("=")
        if key != "budget":
            raise InputError(f"{key!r} cannot be changed.", key="--with", remedy="Use --with budget=2m.")
        budget_s = parse_duration(value, key="--with budget")
    place = open_workspace(workspace)
    _check_campaign(place, campaign)
    with _working(place, "rerun", as_json) as (streams, display), served(place, streams, display):
        from flows.campaign import rerun as again

        with display.shown():
            done = again(place, campaign, budget_s=budget_s)
        outcome = done.outcome.model_dump(mode="json")
        if as_json:
            print_json(outcome, streams.out)
        else:
            streams.out.write(f"{outcome['conclusion'].replace('_', ' ')}: {outcome['reason']}\n")
            streams.out.flush()
        if outcome["conclusion"] == "failed":
            raise RunFailed(f"campaign {campaign} failed: {outcome['reason']}")


@app.command()
def serve(workspace: WorkspaceOption = UNSET) -> None:
    """Keep the Prefect server and its UI running in the foreground until Ctrl-C."""
    import time

    import psutil

    place = open_workspace(workspace)
    from flows import server

    stopped = False
    try:
        with server.serving(place, lambda text: print(text, file=sys.stderr, flush=True)) as running:
            print(f"Prefect UI  {running.ui_url}\nAPI         {running.api_url}\nCtrl-C stops it.", flush=True)
            try:
                while running.pid is None or psutil.pid_exists(running.pid):
                    time.sleep(0.5)
            except KeyboardInterrupt:
                stopped = True
    except server.ServerFailed as error:
        raise RunFailed(str(error)) from error
    if not stopped:
        raise RunFailed(f"the Prefect server ended by itself; its log is {running.log}")
    print("stopped; where another command uses the server, it ends with that one")


app.command()(cli_judge.judge)
app.command()(cli_look.status)
app.command()(cli_look.report)
app.command()(cli_look.ideas)
app.command()(cli_look.doctor)
app.add_typer(cli_look.kb_app, name="kb")
app.add_typer(cli_look.target_app, name="target")


def _check_agents(agents: str) -> None:
    if agents == "offline":
        return
    offline = "The default, --agents offline (search and templates), needs no key."
    if agents != "claude":
        raise InputError(f"there are no agents {agents!r}.", key="--agents", remedy=f"Use offline. {offline}")
    if not os.environ.get("ANTHROPIC_API_KEY"):
        raise InputError("Claude needs the variable ANTHROPIC_API_KEY.", key="--agents",
                         remedy=f"Set it, or leave the option out. {offline}")  # fmt: skip
    raise InputError("this version has no Claude agents.", key="--agents", remedy=offline)


def _run(
    module: str,
    name: str,
    *,
    budget: str,
    new: bool,
    seed: int | None,
    as_json: bool,
    root: Path,
    agents: str = "offline",
) -> None:
    workload, file = _workload(name, budget)
    place = open_workspace(root)
    _check_machine(place)
    with _working(place, module.rsplit(".", maxsplit=1)[-1], as_json) as (streams, display):
        with display.shown():  # what can be wrong is found before there is a server or a run
            _check_model(place, workload, file, display)
        with served(place, streams, display) as url:
            import importlib

            from flows.interrupt import end_zombies, interruptible
            from flows.optimize import begin

            state = begin(place, workload, file, new=new, seed=seed, agents=agents)
            spent = state.clock.spent_s()
            display.say(f"Run {state.run_id}{' goes on' if spent > 1 else ''} · Prefect UI {url}")
            with state.held(), interruptible(state, lambda text: print(text, file=streams.err, flush=True)):
                end_zombies(state.run_id, "CRASHED", "its process was killed")
                with display.shown():
                    state = importlib.import_module(module).start(place, state)
        _finish(state, streams, name, as_json)


@contextmanager
def _working(place: Workspace, log: str, as_json: bool) -> Iterator[tuple[Streams, Display]]:
    """The real streams and a display on them; leftovers of killed commands ended."""
    with quiet(place, log) as streams:
        from flows.terminal import Display
        from profiles.engines.child import reap

        display = Display(None if as_json else streams.err)
        leftovers = reap(place.children)
        if leftovers:
            display.say(f"Ended {leftovers} process(es) that a killed run had left behind")
        yield streams, display


def _workload(name: str, budget: str) -> tuple[Workload, str]:
    from profiles.load import check_workload, load_workload, parse_duration

    workload = load_workload(name)
    file = str(Path(name).expanduser().resolve()) if name.endswith(".toml") else ""
    if budget:
        spend = workload.budget.model_copy(update={"wall_s": parse_duration(budget, key="--budget")})
        workload = workload.model_copy(update={"budget": spend})
        check_workload(workload, file or None)
    return workload, file


def _check_machine(place: Workspace) -> None:
    if shutil.which("g++") is None:
        raise InputError("there is no C++ compiler.", key="g++", remedy="Install g++ (Debian: apt-get install g++).")
    for folder in (place.root, place.models):
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE_BYTES:
            raise InputError(f"only {free / 2**20:.0f} MiB are free here.", file=folder, remedy="Free 1 GiB at least.")


def _check_model(place: Workspace, workload: Workload, file: str, display: Display) -> None:
    from profiles.engines import knob_specs
    from profiles.load import check_context, check_knobs
    from profiles.models import materialise

    display.begin("Model")
    folder = materialise(workload.model, place.models, display.detail)
    check_context(workload, folder, file or None)
    if workload.target == "auto":
        check_knobs(workload, knob_specs(workload, folder), file or None)
    display.end("Model", f"{workload.model.source}, {workload.model.dtype}")


def _check_campaign(place: Workspace, campaign_id: str) -> None:
    """Before a server is started for it; `flows.campaign` finds its run."""
    known = sorted(place.runs.glob("*/campaigns/*/campaign.json"), key=lambda path: path.stat().st_mtime)
    names = [path.parent.name for path in known]
    if campaign_id not in names:
        raise InputError(
            f"no run of this workspace has the campaign {campaign_id!r}.",
            remedy=f"The newest are: {', '.join(names[-5:])}." if names else "There are no campaigns yet.",
            file=place.runs,
        )


def _finish(state: RunState, streams: Streams, name: str, as_json: bool) -> None:
    document = json.loads((state.folder / "report.json").read_text(encoding="utf-8"))
    if as_json:
        print_json(document, streams.out)
    else:
        streams.out.write("\n".join(_headline(document, state.folder, name)) + "\n")
        streams.out.flush()
    if state.record.status != "finished":
        raise RunFailed(f"run {state.run_id} {state.record.status}: {state.record.reason}")


def _headline(document: dict[str, Any], folder: Path, name: str) -> list[str]:
    speed, stack, campaigns = document["speedup"], document["stack"], document["campaigns"]
    lines = [""]
    if speed:
        sure = "" if document["confirmed"] else " (not confirmed)"
        lines.append(
            f"{speed['estimate']:.2f}× {document['metric']} over stock [{speed['low']:.2f}, {speed['high']:.2f}]{sure}"
        )
    else:
        lines.append("No speed-up was confirmed.")
    for layer in document["by_layer"]:
        ratio = layer["ratio"]
        text = f"{ratio['estimate']:.2f}× [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "-"
        lines.append(f"  {layer['layer']:<9} {text}  {layer['how']}")
    lines.append(f"  accuracy  {document['accuracy'].get('status')}")
    lines += [f"  {document['stop_reason']}", f"Report  {folder / 'report.html'}"]
    if stack:
        lines.append(f"Deploy  {folder / 'stack'}")
    once = f", one campaign: roofloop rerun {campaigns[0]['campaign_id']}" if campaigns else ""
    return [*lines, f"Again   roofloop optimize {name} --new{once}", "UI      roofloop serve"]


if __name__ == "__main__":
    main()
