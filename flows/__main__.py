"""The command line: `roofloop optimize | settings | judge | status | report | rerun | ideas | kb | target | doctor …`.

Nothing heavy is imported before it is needed: Prefect reads its settings when it is imported, and help must be quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kernels.errors import InputError

if TYPE_CHECKING:
    from flows.terminal import Streams
    from profiles.workload import Workload
    from tasks.run_state import RunState
    from tasks.workspace import Workspace

LEAST_FREE_BYTES = 1 << 30

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make a given model run as fast as this machine allows, and prove it.",
)
kb_app = typer.Typer(no_args_is_help=True, help="What is remembered: outcomes, lessons, ideas, rules, the ledger.")
target_app = typer.Typer(no_args_is_help=True, help="The machine's ceilings.")
app.add_typer(kb_app, name="kb")
app.add_typer(target_app, name="target")

WorkspaceOption = Annotated[
    Path, typer.Option("--workspace", help="Folder that holds runs/ and .roofloop/.", show_default="this folder")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, nothing else.")]
HERE = Path()


class RunFailed(Exception):
    """The run failed: exit code 1, with a message that is enough."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        returned = app(standalone_mode=False)  # the code of a `typer.Exit`, which is not raised then
        code = returned if isinstance(returned, int) else 0
    except InputError as error:
        _complain(str(error))
        code = 2
    except RunFailed as error:
        _complain(str(error))
        code = 1
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        code = _unexpected(error)
    if code == 130:
        _complain("interrupted; the same command goes on where it stopped")
    sys.exit(code)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _complain(text: str) -> None:
    print(f"roofloop: {text}", file=sys.stderr)


def _unexpected(error: Exception) -> int:
    """Bad options exit with 2; anything else is a fault of ours: one line, and the traceback in a file."""
    show = getattr(error, "show", None)
    if show is not None and hasattr(error, "exit_code"):  # typer's own usage errors
        show()
        return 2
    log = Path(f"roofloop-error-{os.getpid()}.log").resolve()
    try:
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        where = f"; the details are in {log}"
    except OSError:
        where = ""
    _complain(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}{where}")
    return 1


@app.command()
def optimize(  # noqa: PLR0917
    workload: Annotated[str, typer.Argument(help="A workload's name (profiles/workloads/) or the path of a TOML.")],
    budget: Annotated[str, typer.Option(help="Time for the whole run, such as 10m; in place of the workload's.")] = "",
    new: Annotated[bool, typer.Option("--new", help="Begin a new run, even where one is unfinished.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; drawn when not given.")] = None,
    agents: Annotated[str, typer.Option(help="offline (search and templates) or claude.")] = "offline",
    as_json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Run the whole loop for a workload, or go on with its newest unfinished run, and write the report."""
    _check_agents(agents)
    _run("flows.optimize", workload, budget=budget, new=new, seed=seed, as_json=as_json, root=workspace, agents=agents)


@app.command()
def settings(
    workload: Annotated[str, typer.Argument(help="A workload's name or the path of a TOML.")],
    budget: Annotated[str, typer.Option(help="Time for the whole run, such as 10m.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed of the run; drawn when not given.")] = None,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Step 0 alone: search the engine's settings under the workload's gates."""
    _run("flows.settings", workload, budget=budget, new=True, seed=seed, as_json=as_json, root=workspace)


@app.command()
def judge(  # noqa: PLR0917
    problem: Annotated[
        str, typer.Argument(help="rmsnorm, softmax, matmul, silu_mul, a KernelBench .py or a FlashInfer-Trace .json.")
    ],
    candidate: Annotated[Path, typer.Argument(help="A .cpp, a .py, or a FlashInfer-Trace Solution .json.")],
    against: Annotated[
        Path | None, typer.Option(help="Compare with this candidate instead of eager, vendor and torch.compile.")
    ] = None,
    mode: Annotated[Literal["screen", "confirm"], typer.Option(help="Fast or full.")] = "confirm",
    budget: Annotated[str, typer.Option(help="Time for measuring.")] = "30s",
    threads: Annotated[int, typer.Option(min=1, help="Cores that either side may use.")] = 1,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Judge one candidate: is it right, and how much faster is it? Exit code 0 whatever the verdict."""
    from kernels import problems
    from kernels.ruler.judge import judge as rule
    from profiles.load import parse_duration

    one = problems.load(problem)
    subject = _candidate(candidate, one)
    rival = _candidate(against, one) if against else None
    place = _workspace(workspace)
    with _quiet(place, "judge") as streams:
        verdict = rule(
            one, subject, mode=mode, ceilings=None, threads=threads, builds=place.builds,
            budget_s=parse_duration(budget, key="--budget"), baseline=rival,
        )  # fmt: skip
        document = verdict.to_json()
        if as_json:
            _print_json(streams, document)
        else:
            streams.out.write("\n".join(_verdict_lines(document)) + "\n")


def _candidate(file: Path, problem: Any) -> Any:
    from kernels.ruler.spec import Candidate

    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"this candidate cannot be read: {error}.", file=file, remedy="Name a readable file."
        ) from error
    if file.suffix == ".json":
        from kernels.problems.flashinfer import load_solution

        return load_solution(file)
    if file.suffix in (".cpp", ".cc", ".cxx"):
        entry = f"run_{problem.operator}"
        return Candidate(
            "cpp", source, entry, prepares=f"prepare_{problem.operator}" in source, origin=f"file:{file.name}"
        )
    if file.suffix != ".py":
        raise InputError(
            f"a {file.suffix or 'nameless'} file is no candidate.", file=file, remedy="Use .cpp, .py or .json."
        )
    if "class ModelNew" in source:
        from kernels.problems.kernelbench import load_candidate

        return load_candidate(file)
    language = "triton" if "triton.jit" in source else "torch"
    return Candidate(language, source, "run", prepares="def prepare(" in source, origin=f"file:{file.name}")


def _verdict_lines(verdict: dict[str, Any]) -> list[str]:
    speed = verdict.get("speedup")
    lines = [f"{verdict['status']}" + (f": {verdict['reason']}" if verdict.get("reason") else "")]
    if speed:
        lines.append(
            f"speed-up {speed['estimate']:.3f}x [{speed['low']:.3f}, {speed['high']:.3f}], n = {speed['n']}, "
            f"claim {verdict['claim']:.3f}x"
        )
    if verdict.get("first_error"):
        error = verdict["first_error"]
        lines.append(
            f"first error: {error.get('output')} at {error.get('index')}, shape {error.get('shape')}: "
            f"got {error.get('got')}, expected {error.get('expected')}, allowed {error.get('allowed')}"
        )
    lines += [
        f"{name}: {_words(verdict.get(name))}" for name in ("provenance", "confinement", "noise") if verdict.get(name)
    ]
    return lines


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(held)}" for key, held in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_words(held) for held in value) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="A run's id; all runs when not given.")] = "",
    as_json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Runs of this workspace: how far they are, the best so far, the budget left."""
    from tasks.run_state import list_runs, read_json

    found = list_runs(_workspace(workspace).runs, lambda record: run in ("", record.run_id))
    if run and not found:
        raise _no_run(run, _workspace(workspace))
    rows = []
    for state in found:
        live = read_json(state.folder / "progress.json") or {}
        alive = state.record.status == "running" and _alive(live)
        said = state.record.status if alive or state.record.status != "running" else "killed"
        rows.append(
            {
                "run": state.run_id, "status": said, "stage": live.get("title", ""), "best": live.get("best", ""),
                "spent_s": round((read_json(state.folder / "clock.json") or {}).get("spent_s", 0.0), 1),
                "budget_s": state.record.workload.budget.wall_s, "reason": state.record.reason,
            }
        )  # fmt: skip
    _show(rows, as_json, empty="No runs yet. Begin with: roofloop optimize smollm2-cpu")


def _alive(live: dict[str, Any]) -> bool:
    import psutil

    try:
        return abs(psutil.Process(live["pid"]).create_time() - live["pid_started"]) < 1.0
    except (KeyError, TypeError, psutil.NoSuchProcess):
        return False


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run's id; the newest when not given.")] = "",
    as_json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Write a run's report anew and say where it lies."""
    place = _workspace(workspace)
    state = _find_run(place, run)
    from kb.store import Store
    from tasks.report import write_report

    with _quiet(place, "report") as streams:
        page = write_report(state.folder, Store(place.kb))
        if as_json:
            _print_json(streams, json.loads((state.folder / "report.json").read_text(encoding="utf-8")))
        else:
            streams.out.write(f"{page}\n")


@app.command()
def rerun(
    campaign: Annotated[str, typer.Argument(help="A campaign's id, as the report and the UI show it.")],
    changed: Annotated[list[str] | None, typer.Option("--with", help="budget=2m")] = None,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Run one campaign again; settled attempts are reused, the others tried again."""
    from profiles.load import parse_duration

    budget_s = None
    for item in changed or ():
        key, _, value = item.partition("=")
        if key != "budget":
            raise InputError(f"{key!r} cannot be changed.", key="--with", remedy="Use --with budget=2m.")
        budget_s = parse_duration(value, key="--with")
    place = _workspace(workspace)
    with _quiet(place, "rerun") as streams, _server(place, streams):
        from flows.campaign import rerun as again
        from flows.terminal import Display

        with Display(None if as_json else streams.err).shown():
            done = again(place, campaign, budget_s=budget_s)
        outcome = done.outcome.model_dump(mode="json")
        if as_json:
            _print_json(streams, outcome)
        else:
            streams.out.write(f"{outcome['conclusion']}: {outcome['reason']}\n")
        if outcome["conclusion"] == "failed":
            raise RunFailed(f"campaign {campaign} failed: {outcome['reason']}")


@app.command()
def ideas(
    run: Annotated[str, typer.Argument(help="A run's id; the newest when not given.")] = "",
    as_json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """The tree of ideas of a run with the parts of each score."""
    place = _workspace(workspace)
    from kb import queries
    from kb.store import Store

    rows = queries.tree(Store(place.kb), _find_run(place, run).run_id)
    if as_json:
        _print_json(None, rows)
        return
    keys = ("status", "score", "p_success", "gain", "urgency", "accuracy_penalty", "cost_minutes", "reason")
    _show(
        [
            {"idea": "  " * row["depth"] + row["lever"], "problem": row["problem_name"] or ""}
            | {k: row.get(k) for k in keys}
            for row in rows
        ],
        False,
    )


@app.command()
def doctor(as_json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """Check what a run needs: compiler, disk, memory, noise, server, model cache, confinement. Each with a remedy."""
    place = _workspace(workspace)
    from flows import server
    from tasks.doctor import checks

    found = server.find(place)
    rows = [
        {"check": c.name, "ok": c.ok, "detail": c.detail, "remedy": "" if c.ok else c.remedy, "needed": c.needed}
        for c in checks(place.state, place.models, server_url=found.api_url if found else None)
    ]
    _show(rows, as_json)
    if any(row["needed"] and not row["ok"] for row in rows):
        raise typer.Exit(1)


@app.command()
def serve(workspace: WorkspaceOption = HERE) -> None:
    """Keep the Prefect server and its UI running in the foreground until Ctrl-C."""
    place = _workspace(workspace)
    from flows import server

    with server.serving(place, lambda text: print(text, file=sys.stderr)) as running:
        print(f"Prefect UI  {running.ui_url}\nAPI         {running.api_url}\nCtrl-C stops it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    print("stopped")


@kb_app.command("outcomes")
def kb_outcomes(run: str = "", limit: int = 50, as_json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """What campaigns came to, newest first."""
    from kb import queries

    _show(queries.outcomes(_store(workspace), run_id=run or None, limit=limit), as_json, empty="No outcomes yet.")


@kb_app.command("lessons")
def kb_lessons(
    operator: str = "", every: Annotated[bool, typer.Option("--all", help="Expired and retired ones too.")] = False,
    as_json: JsonOption = False, workspace: WorkspaceOption = HERE,
) -> None:  # fmt: skip
    """Lessons with their record of wins and losses."""
    from kb import queries

    _show(queries.lessons(_store(workspace), operator=operator or None, every=every), as_json, empty="No lessons yet.")


@kb_app.command("rules")
def kb_rules(as_json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """Rules that agents are shown."""
    from kb import queries

    _show(queries.rules(_store(workspace)), as_json, empty="No rules yet.")


@kb_app.command("ideas")
def kb_ideas(run: str = "", as_json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """The tree of ideas of a run; the same as `roofloop ideas`."""
    ideas(run, as_json, workspace)


@kb_app.command("sql")
def kb_sql(query: str, as_json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """Ask the read-only snapshot in SQL."""
    from kb import queries

    _show(queries.sql(_store(workspace), query), as_json, empty="No rows.")


@kb_app.command("rebuild")
def kb_rebuild(as_json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """Build the database anew from the record files."""
    from kb import queries

    _show(queries.rebuild(_store(workspace)), as_json)


@kb_app.command("verify")
def kb_verify(as_json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """Check the ledger: name every row that was edited, moved or removed. Exit code 1 when there is one."""
    from kb import queries

    found = queries.verify(_store(workspace))
    if as_json:
        _print_json(None, {"ok": found.ok, "lines": found.lines, "head": found.head, "faults": list(found.faults)})
    else:
        print("\n".join([*map(str, found.faults), f"{found.lines} lines, head {found.head}"]))
    if not found.ok:
        raise typer.Exit(1)


@target_app.command("measure")
def target_measure(
    force: Annotated[bool, typer.Option("--force", help="Measure even where a trusted measurement is kept.")] = False,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Measure this machine's ceilings: bandwidth by size class and threads, FLOP/s by dtype."""
    place = _workspace(workspace)
    from profiles.ceilings import measure_target, summary

    found = measure_target(place.targets, force=force, progress=lambda text: print(text, file=sys.stderr))
    if as_json:
        _print_json(None, found.model_dump(mode="json"))
    else:
        print(summary(found))


@target_app.command("show")
def target_show(
    name: Annotated[str, typer.Argument(help="A datasheet of profiles/targets/; a list when not given.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Show a datasheet target with the source of each number."""
    from profiles.load import list_targets, load_target

    if name:
        document = load_target(name).model_dump(mode="json")
        _print_json(None, document)
    else:
        _show([{"target": one} for one in list_targets()], as_json)


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
    place = _workspace(root)
    _check_machine(place)
    with _quiet(place, module.rsplit(".", maxsplit=1)[-1]) as streams:
        from flows.terminal import Display
        from profiles.engines.child import reap

        display = Display(None if as_json else streams.err)
        leftovers = reap(place.children)
        if leftovers:
            display.say(f"Ended {leftovers} process(es) that a killed run had left behind")
        with _server(place, streams, display) as url:
            import importlib

            from flows.interrupt import end_zombies, interruptible
            from flows.optimize import begin

            state = begin(place, workload, file, new=new, seed=seed, agents=agents)
            display.say(f"Run {state.run_id} · Prefect UI {url}")
            with state.held(), interruptible(state, lambda text: print(text, file=streams.err, flush=True)):
                end_zombies(state.run_id, "CRASHED", "its process was killed")
                with display.shown():
                    state = importlib.import_module(module).start(place, state)
        _finish(state, streams, as_json)


def _workload(name: str, budget: str) -> tuple[Workload, str]:
    from profiles.load import check_workload, load_workload, parse_duration

    workload = load_workload(name)
    file = name if name.endswith(".toml") else ""
    if budget:
        spend = workload.budget.model_copy(update={"wall_s": parse_duration(budget, key="--budget")})
        workload = workload.model_copy(update={"budget": spend})
        check_workload(workload, file or None)
    return workload, file


def _finish(state: RunState, streams: Streams, as_json: bool) -> None:
    document = json.loads((state.folder / "report.json").read_text(encoding="utf-8"))
    if as_json:
        _print_json(streams, document)
    else:
        streams.out.write("\n".join(_headline(document, state.folder)) + "\n")
        streams.out.flush()
    if state.record.status != "finished":
        raise RunFailed(f"run {state.run_id} {state.record.status}: {state.record.reason}")


def _headline(document: dict[str, Any], folder: Path) -> list[str]:
    speed, stack = document["speedup"], document["stack"]
    lines = [""]
    if speed:
        sure = "" if document["confirmed"] else " (not confirmed)"
        lines.append(
            f"{speed['estimate']:.2f}x {document['metric']} over stock [{speed['low']:.2f}, {speed['high']:.2f}]{sure}"
        )
    else:
        lines.append("No speed-up was confirmed.")
    for layer in document["by_layer"]:
        ratio = layer["ratio"]
        text = f"{ratio['estimate']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "-"
        lines.append(f"  {layer['layer']:<9} {text}  {layer['how']}")
    lines.append(f"  accuracy  {document['accuracy'].get('status')}")
    lines += [f"  {document['stop_reason']}", f"Report  {folder / 'report.html'}"]
    if stack:
        lines.append(f"Deploy  {folder / 'stack'}")
    return lines


def _check_machine(place: Workspace) -> None:
    if shutil.which("g++") is None:
        raise InputError("there is no C++ compiler.", key="g++", remedy="Install g++ (Debian: apt-get install g++).")
    for folder in (place.root, place.models):
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE_BYTES:
            raise InputError(f"only {free / 2**20:.0f} MiB are free here.", file=folder, remedy="Free 1 GiB at least.")


@contextlib.contextmanager
def _quiet(place: Workspace, name: str) -> Iterator[Streams]:
    from flows.terminal import quiet

    with quiet(place.logs / f"{name}.log") as streams:
        yield streams


@contextlib.contextmanager
def _server(place: Workspace, streams: Streams, display: Any = None) -> Iterator[str]:
    from flows import server

    say: Callable[[str], None] = display.say if display is not None else lambda _: None
    try:
        with server.serving(place, say) as running:
            yield running.ui_url
    except server.ServerFailed as error:
        raise RunFailed(f"{error}. See also {streams.log}.") from error


def _workspace(root: Path) -> Workspace:
    from tasks.workspace import Workspace

    return Workspace(root).create()


def _store(root: Path) -> Any:
    from kb.store import Store

    store = Store(_workspace(root).kb)
    store.ingest()
    return store


def _find_run(place: Workspace, run_id: str) -> RunState:
    from tasks.run_state import list_runs

    found = list_runs(place.runs, lambda record: run_id in ("", record.run_id))
    if not found:
        raise _no_run(run_id, place)
    return found[0]


def _no_run(run_id: str, place: Workspace) -> InputError:
    what = f"there is no run {run_id!r}." if run_id else "there are no runs yet."
    return InputError(what, file=place.runs, remedy="List the runs with `roofloop status`.")


def _print_json(streams: Streams | None, document: Any) -> None:
    out = streams.out if streams else sys.stdout
    json.dump(document, out, indent=1, ensure_ascii=False, default=str)
    out.write("\n")
    out.flush()


def _show(rows: Any, as_json: bool, *, empty: str = "Nothing.") -> None:
    """Rows as a table, or as JSON."""
    if as_json:
        _print_json(None, rows)
        return
    rows = rows if isinstance(rows, Sequence) else [rows]
    if not rows:
        print(empty)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    first = rows[0] if isinstance(rows[0], dict) else {"value": rows[0]}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key in first:
        table.add_column(str(key).replace("_", " "), overflow="fold")
    for row in rows:
        cells = row if isinstance(row, dict) else {"value": row}
        table.add_row(*(Text("" if cells.get(key) is None else _words(cells[key])) for key in first))
    Console().print(table)


if __name__ == "__main__":
    main()
