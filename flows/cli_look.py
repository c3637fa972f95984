"""Commands that look at what is there: `status`, `report`, `ideas`, `doctor`, `kb …`, `target …`. No server needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_common import (
    UNBOUNDED,
    UNSET,
    JsonOption,
    RunArgument,
    WorkspaceOption,
    find_run,
    open_workspace,
    print_json,
    quiet,
    show,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kb.store import Store
    from tasks.run_state import RunState

kb_app = typer.Typer(no_args_is_help=True, help="What is remembered: outcomes, lessons, ideas, rules, the ledger.")
target_app = typer.Typer(no_args_is_help=True, help="The machine's ceilings.")


def status(
    run: Annotated[str, typer.Argument(help="A run's id for its stages; all runs when not given.")] = "",
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Runs of this workspace: how far they are, the best so far, the budget left."""
    from tasks.run_state import list_runs

    place = open_workspace(workspace)
    if not run:
        rows = [_row(state) for state in list_runs(place.runs)]
        show(rows, as_json, empty="No runs yet. Begin with: roofloop optimize smollm2-cpu")
        return
    state = find_run(place, run)
    row = _row(state) | {
        "stages": [
            {"title": stage["title"], "seconds": stage["seconds"], "stage": stage["stage"]} for stage in state.stages()
        ],
        "folder": str(state.folder),
    }
    if as_json:
        print_json(row)
    else:
        print("\n".join(_one_run(row)))


def _row(state: RunState) -> dict[str, Any]:
    from tasks.run_state import read_json

    live = read_json(state.folder / "progress.json") or {}
    running = state.record.status == "running"
    alive = running and _alive(live)
    return {
        "run": state.run_id, "status": "killed" if running and not alive else state.record.status,
        "stage": live.get("title", "") if running else "", "best": live.get("best", ""),
        "spent_s": round(_spent_s(state, live if alive else {}), 1), "budget_s": state.record.workload.budget.wall_s,
        "updated": live.get("updated_at", ""), "reason": state.record.reason,
    }  # fmt: skip


def _spent_s(state: RunState, live: Mapping[str, Any]) -> float:
    """What the clock's file says, and in a live run the time since it was written, at most the process's age."""
    import time

    import psutil

    from tasks.run_state import read_json

    file = state.folder / "clock.json"
    spent = float((read_json(file) or {}).get("spent_s", 0.0))
    if not live:
        return spent
    try:
        age = time.time() - psutil.Process(live["pid"]).create_time()
        since = time.time() - file.stat().st_mtime if file.exists() else age
    except (OSError, psutil.Error):
        return spent
    return spent + max(0.0, min(age, since))


def _alive(live: Mapping[str, Any]) -> bool:
    import psutil

    try:
        return abs(psutil.Process(live["pid"]).create_time() - live["pid_started"]) < 1.0
    except (KeyError, TypeError, ValueError, psutil.Error):
        return False


def _one_run(row: Mapping[str, Any]) -> list[str]:
    from flows.terminal import duration

    lines = [f"{row['run']}: {row['status']}" + (f", {row['reason']}" if row["reason"] else "")]
    lines += [f"  {stage['title']} ({duration(stage['seconds'])})" for stage in row["stages"]]
    if row["stage"] and row["stage"] not in [stage["title"] for stage in row["stages"]]:
        lines.append(f"▸ {row['stage']}")
    if row["best"]:
        lines.append(f"best so far   {row['best']}")
    left = max(0.0, row["budget_s"] - row["spent_s"])
    lines.append(f"budget left   {duration(left)} of {duration(row['budget_s'])}")
    lines.append(f"folder        {row['folder']}")
    if row["status"] in ("killed", "interrupted"):
        lines.append("The same `roofloop optimize` goes on with it.")
    return lines


def report(run: RunArgument = "", as_json: JsonOption = False, workspace: WorkspaceOption = UNSET) -> None:
    """Write a run's report anew and say where it lies."""
    place = open_workspace(workspace)
    state = find_run(place, run)
    from kb.store import Store
    from tasks.report import write_report
    from tasks.run_state import read_json

    with quiet(place, "report") as streams:
        page = write_report(state.folder, Store(place.kb))
        if as_json:
            print_json(read_json(state.folder / "report.json"), streams.out)
        else:
            streams.out.write(f"{page}\n")


def ideas(run: RunArgument = "", as_json: JsonOption = False, workspace: WorkspaceOption = UNSET) -> None:
    """The tree of ideas of a run with the parts of each score."""
    place = open_workspace(workspace)
    state = find_run(place, run)
    from kb import queries

    rows = queries.tree(_store(place.root), state.run_id)
    if as_json:
        print_json(rows)
        return
    keys = ("status", "score", "p_success", "gain", "urgency", "accuracy_penalty", "cost_minutes", "reason")
    show(
        [
            {"idea": "  " * row["depth"] + row["lever"], "problem": row["problem_name"] or ""}
            | {key: row.get(key) for key in keys}
            for row in rows
        ],
        False,
    )


def doctor(as_json: JsonOption = False, workspace: WorkspaceOption = UNSET) -> None:
    """Check what a run needs: compiler, disk, memory, noise, server, model cache, confinement. Each with a remedy.

    Exit code 1 when something that a run cannot do without is missing.
    """
    import os

    place = open_workspace(workspace)
    from flows import server
    from tasks.doctor import checks

    found = server.find(place)
    url = os.environ.get("PREFECT_API_URL") or (found.api_url if found else None)
    results = checks(place.state, place.models, server_url=url)
    if as_json:
        print_json(
            [
                {
                    "check": c.name,
                    "ok": c.ok,
                    "detail": c.detail,
                    "remedy": "" if c.ok else c.remedy,
                    "needed": c.needed,
                }
                for c in results
            ]
        )
    else:
        width = max(len(check.name) for check in results)
        for check in results:
            mark = "ok  " if check.ok else "FAIL" if check.needed else "weak"
            print(f"{mark}  {check.name:<{width}}  {check.detail}")
            if not check.ok and check.remedy:
                print(" " * (width + 8) + check.remedy)
    if any(check.needed and not check.ok for check in results):
        raise typer.Exit(1)


def _store(root: Path) -> Store:
    from kb.store import Store

    store = Store(open_workspace(root).kb)
    store.ingest()
    return store


@kb_app.command("outcomes")
def kb_outcomes(
    run: Annotated[str, typer.Option(help="Of this run only.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """What campaigns came to, newest first."""
    from kb import queries

    rows = queries.outcomes(_store(workspace), run_id=run or None, limit=limit)
    show(rows if as_json else [_outcome(row) for row in rows], as_json, empty="No outcomes yet.")


def _outcome(row: Mapping[str, Any]) -> dict[str, Any]:
    bounded = row["speedup"] is not None and row["high"] < UNBOUNDED
    speed = f"{row['speedup']:.2f}× [{row['low']:.2f}, {row['high']:.2f}]" if bounded else ""
    return {
        "campaign": row["campaign_id"], "problem": row["problem_name"], "lever": row["lever"],
        "conclusion": row["conclusion"], "speed-up": speed, "end to end": row["decision"], "tries": row["attempts"],
        "seconds": row["seconds"], "reason": row["reason"],
    }  # fmt: skip


@kb_app.command("lessons")
def kb_lessons(
    operator: Annotated[str, typer.Option(help="Of this operator only.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Expired and retired ones too.")] = False,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Lessons with their record of wins and losses."""
    from kb import queries

    show(queries.lessons(_store(workspace), operator=operator or None, every=every), as_json, empty="No lessons yet.")


@kb_app.command("rules")
def kb_rules(as_json: JsonOption = False, workspace: WorkspaceOption = UNSET) -> None:
    """Rules that agents are shown."""
    from kb import queries

    show(queries.rules(_store(workspace)), as_json, empty="No rules yet.")


@kb_app.command("ideas")
def kb_ideas(run: RunArgument = "", as_json: JsonOption = False, workspace: WorkspaceOption = UNSET) -> None:
    """The tree of ideas of a run; the same as `roofloop ideas`."""
    ideas(run, as_json, workspace)


@kb_app.command("sql")
def kb_sql(
    query: Annotated[str, typer.Argument(help="Such as 'SELECT * FROM outcomes'.")],
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Ask the read-only snapshot in SQL."""
    from kb import queries

    show(queries.sql(_store(workspace), query), as_json, empty="No rows.")


@kb_app.command("rebuild")
def kb_rebuild(as_json: JsonOption = False, workspace: WorkspaceOption = UNSET) -> None:
    """Build the database anew from the record files."""
    from kb import queries
    from kb.store import Store

    done = queries.rebuild(Store(open_workspace(workspace).kb))
    if as_json:
        print_json(done)
        return
    print(f"{done.added + done.known} records in {done.seconds:.1f} s, head of the ledger {done.head}")
    for name, why in done.set_aside:
        print(f"set aside: {name}: {why}")


@kb_app.command("verify")
def kb_verify(
    head: Annotated[str, typer.Option(help="A head noted earlier, as every report prints it.")] = "",
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Check the ledger: name every row that was edited, moved or removed. Exit code 1 when there is one."""
    from kb import queries

    found = queries.verify(_store(workspace), head=head or None)
    if as_json:
        print_json({"ok": found.ok, "lines": found.lines, "head": found.head, "faults": found.faults})
    else:
        for fault in found.faults:
            print(f"line {fault.number}: {fault.kind} {fault.id}: {fault.problem}")
        print(f"{'sound' if found.ok else 'NOT SOUND'}: {found.lines} lines, head {found.head}")
    if not found.ok:
        raise typer.Exit(1)


@target_app.command("measure")
def target_measure(
    force: Annotated[bool, typer.Option("--force", help="Measure even where a trusted measurement is kept.")] = False,
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Measure this machine's ceilings: bandwidth by size class and threads, FLOP/s by dtype."""
    place = open_workspace(workspace)
    from profiles.ceilings import measure_target, summary

    found = measure_target(place.targets, force=force, progress=lambda text: print(text, file=sys.stderr))
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print(summary(found))


@target_app.command("show")
def target_show(
    name: Annotated[str, typer.Argument(help="A datasheet of profiles/targets/; a list when not given.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Show a datasheet target with the source of each number."""
    from profiles.load import list_targets, load_target

    if not name:
        show([{"target": one} for one in list_targets()], as_json)
        return
    target = load_target(name)
    if as_json:
        print_json(target.model_dump(mode="json"))
        return
    print(f"{target.name}: {target.device} × {target.device_count}, {target.kind}, {target.origin}")
    for level in target.bandwidths:
        print(f"  {level.level:<9} {level.read_gbps:>12,.0f} GB/s")
    for rate in target.flops:
        print(f"  {rate.dtype:<9} {rate.gflops:>12,.0f} GFLOP/s")
    for key, source in target.sources.items():
        print(f"  {key}: {source}")
