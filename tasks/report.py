"""The report of a run: `report.json`, `report.html` and the stack as files, made from what the run's folder holds.

It can be written at any time: what is not measured yet is left out, never made up.
"""

from __future__ import annotations

import base64
import fcntl
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from kb import ledger, queries
from kb.figures import tree_png
from kb.store import Store
from profiles.engines.base import Resolved, Stack
from profiles.operators import Profile, ProfileRow
from profiles.roofline import Point, roofline_figure
from profiles.target import Target
from tasks import report_campaigns, report_figures, report_layers, report_words
from tasks.codec import from_json
from tasks.report_schema import BudgetReport, KernelInStack, MeasuredRow, OperatorRow, Report, StackReport
from tasks.run_state import RunState, now, open_run, read_json, write_json
from tasks.stack_files import kernel_file, write_stack

STANDINGS = {
    "confirmed": "Confirmed against the stock engine in fresh engines.",
    "provisional": "Provisional: it has not been confirmed against the stock engine in fresh engines yet.",
    "rejected": "Do not deploy: the confirmation in fresh engines rejected it.",
}


def write_report(folder: Path, store: Store) -> Path:
    """Write `report.json`, `report.html` and `stack/` into the run's folder.

    Returns:
        Path of `report.html`.

    Raises:
        InputError: the folder holds no run.
    """
    report = build_report(folder, store)
    page = folder / "report.html"
    text = render(report, figures_of(report, folder, store))
    with (folder / ".report.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the run itself and a person may both ask for it
        write_json(folder / "report.json", report.model_dump(mode="json"))
        stack = _stack(_stages(folder))
        if stack is not None and report.stack is not None:
            note = " ".join(part for part in (STANDINGS[report.stack.standing], report.decision) if part)
            write_stack(stack, folder / "stack", note=note)
        else:
            shutil.rmtree(folder / "stack", ignore_errors=True)
        temporary = folder / ".report.html.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(page)
    return page


def render(report: Report, figures: Mapping[str, bytes]) -> str:
    """The report as one self-contained HTML page. Everything that came from elsewhere is escaped."""
    environment = Environment(
        loader=PackageLoader("tasks"), autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    encoded = {name: base64.b64encode(png).decode() for name, png in figures.items()}
    page = environment.get_template("report.html.j2")
    return page.render(r=report, w=report_words, figures=encoded, standings=STANDINGS)


def build_report(folder: Path, store: Store) -> Report:
    """Gather everything that the run has found out so far.

    Raises:
        InputError: the folder holds no run.
    """
    run, stages = open_run(folder), _stages(folder)
    target, search, base = (stages.get(name) for name in ("010-target", "040-settings", "030-baseline"))
    final = stages.get("900-final") or {}
    ended = "900-final" in stages
    comparison, decision = final.get("comparison"), final.get("decision") or {}
    evaluations = _evaluations(stages)
    plans = {int(name[:-7]): result for name, result in stages.items() if name.endswith("20-plan")}
    campaigns = report_campaigns.campaigns_of(folder, evaluations)
    ideas = report_campaigns.ideas_of(store, run.run_id)
    speedup = report_layers.interval((comparison or {}).get("interval"))
    return Report(
        run_id=run.run_id,
        workload=run.record.workload.model_dump(mode="json"),
        target=target["target"] if target else {"device": "unknown"},
        status={"finished": "finished", "failed": "failed"}.get(run.record.status, "unfinished"),
        stop_reason=run.record.reason or final.get("stop_reason") or "",
        metric=run.record.workload.objective,
        speedup=speedup,
        confirmed=decision.get("decision") == "promoted",
        decision=decision.get("reason", ""),
        by_layer=report_layers.by_layer(search, evaluations, campaigns, speedup, ended=ended),
        accuracy=_accuracy(comparison, evaluations, ended=ended),
        baseline=_baseline(base, comparison),
        best=_side("best", comparison, "b", _stack(stages)) if comparison and comparison.get("b") else None,
        peers=tuple(peer.model_dump(mode="json") for peer in run.record.workload.peers),
        operators=_operators(stages),
        profile=_profile(stages),
        trials=report_campaigns.trials_of(search),
        settings_search=_settings_search(search),
        ideas=ideas,
        campaigns=campaigns,
        refused=report_campaigns.refused_of(search, campaigns, evaluations, plans, ideas, ended=ended),
        stack=_stack_report(folder, stages, evaluations),
        versions=run.record.versions | ({"engine": base["resolved"]["version"]} if base else {}),
        noise=_noise(target, comparison),
        budget=_budget(run, folder),
        ledger_head=ledger.head(store.root),
        generated_at=now(),
    )


def figures_of(report: Report, folder: Path, store: Store) -> dict[str, bytes]:
    """The report's pictures as PNG, by name; one whose data is not there yet is left out."""
    stages = _stages(folder)
    figures: dict[str, bytes] = {}
    if report.speedup or any(layer.ratio for layer in report.by_layer):
        figures["by_layer"] = report_figures.by_layer_figure(report.by_layer, report.speedup)
    if report.operators:
        figures["operators"] = report_figures.operators_figure(report.operators)
    if report.trials:
        figures["trials"] = report_figures.trials_figure(report.trials, report.metric)
    if report.ideas:
        figures["ideas"] = tree_png([_plain(row) for row in queries.tree(store, report.run_id)])
    if "110-profile" in stages and "010-target" in stages:
        held = stages["110-profile"]
        profile = from_json(Profile, held["profile"])
        target = Target.model_validate(stages["010-target"]["target"])
        figures["roofline"] = roofline_figure(
            points(profile), target, int(held["threads"]), dtype=profile.dtype, title="Operators before any kernel"
        )
    return figures


def points(profile: Profile) -> list[Point]:
    """The operators of a profile for the roofline picture, one per operator, role and phase."""
    return [
        Point(
            label=f"{row.operator} {row.role} {row.phase}".replace(f"{row.operator} {row.operator}", row.operator),
            flops=row.flops / row.calls,
            bytes_moved=((row.bytes_read or 0.0) + (row.bytes_written or 0.0)) / row.calls,
            measured_s=row.time_ms / 1e3 / row.calls,
            time_share=row.time_share,
        )
        for row in profile.singles()
        if row.flops and row.calls
    ]


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose dollar signs matplotlib takes for text, not for the begin of a formula."""
    return {key: held.replace("$", r"\$") if isinstance(held, str) else held for key, held in row.items()}


def _stages(folder: Path) -> dict[str, Any]:
    """Results of the finished stages by name, in the order in which they began: names do not tell it, since
    campaigns are called by their hashes and round 10 sorts before round 2.
    """
    held = ((file.stem, read_json(file)) for file in (folder / "stages").glob("*.json"))
    found = [(name, value) for name, value in held if isinstance(value, dict) and "result" in value]
    found.sort(key=lambda pair: (pair[1].get("started_at", ""), pair[0]))
    return {name: value["result"] for name, value in found}


def _evaluations(stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of the end-to-end stages in the order of time, each with the campaigns that it tested."""
    return [
        {"campaigns": [name.split("40-evaluate-")[1]]} | result
        for name, result in stages.items()
        if "40-evaluate-" in name
    ]


def _stack(stages: Mapping[str, Any]) -> Stack | None:
    """The stack in force: the confirmed one, else that after the latest decision, else the best settings."""
    if "900-final" in stages:
        return from_json(Stack, stages["900-final"]["stack"])
    evaluated = _evaluations(stages)
    if evaluated:
        return from_json(Stack, evaluated[-1]["stack"])
    search = stages.get("040-settings")
    return from_json(Stack, {"settings": search["best"], "kernels": ()}) if search else None


def _accuracy(
    comparison: Mapping[str, Any] | None, evaluations: list[dict[str, Any]], *, ended: bool
) -> dict[str, Any]:  # fmt: skip
    held, where = (comparison or {}).get("accuracy"), "the final confirmation"
    if not held and not ended:
        promoted = [e["comparison"].get("accuracy") for e in evaluations if e["promoted"]]
        held, where = next((one for one in reversed(promoted) if one), None), "the latest promotion"
    if not held:
        reason = "the final stack has not been compared with stock yet"
        if ended:
            reason = "stock stays: there was nothing to compare with it"
        if comparison:
            reason = "the comparison did not come as far as accuracy"
        return {"status": "not evaluated", "reason": reason, "checks": []}
    keys = ("name", "status", "value", "limit", "detectable", "detail")
    checks = [{key: check.get(key) for key in keys} for check in held["checks"]]
    kept = {key: held[key] for key in ("status", "reason", "scored_tokens", "stock_tokens")}
    return kept | {"measured_on": where, "checks": checks}


def _baseline(base: Mapping[str, Any] | None, comparison: Mapping[str, Any] | None) -> MeasuredRow | None:
    """Stock: as measured beside the final stack where it was, else as measured at the begin."""
    if comparison:
        return _side("stock", comparison, "a")
    if base is None:
        return None
    return _measured("stock", base["resolved"], base["row"], base["value"], base["rounds"], None)


def _side(label: str, comparison: Mapping[str, Any], side: str, stack: Stack | None = None) -> MeasuredRow:
    metrics = comparison.get(f"{side}_row") or {"peak_memory_bytes": comparison[f"{side}_peak_memory_bytes"]}
    return _measured(
        label, comparison[side], metrics, comparison[f"{side}_value"], len(comparison["pairs"]), stack
    )  # fmt: skip


def _measured(  # noqa: PLR0917
    label: str,
    resolved: Mapping[str, Any],
    metrics: Mapping[str, Any],
    value: float | None,
    rounds: int,
    stack: Stack | None,
) -> MeasuredRow:
    return MeasuredRow(
        label=label,
        stack_id=stack.id if stack else "stock",
        settings=resolved["config"],
        settings_hash=Resolved.model_validate(resolved).hash,
        kernels=tuple(kernel.problem.name for kernel in stack.kernels) if stack else (),
        value=value,
        metrics={key: held for key, held in metrics.items() if not isinstance(held, bool)},
        rounds=rounds,
    )


def _operators(stages: Mapping[str, Any]) -> tuple[OperatorRow, ...]:
    if "110-profile" not in stages:
        return ()
    held = stages.get("905-profile-after")
    after = from_json(Profile, held["profile"]) if held else None
    places = {site: row.kernel for row in after.singles() if row.kernel for site in row.sites} if after else {}
    before = _sums(from_json(Profile, stages["110-profile"]["profile"]), places)
    later = _sums(after, places) if after else {}
    rows = []
    for operator, phase in dict.fromkeys([*before, *later]):
        was, will = before.get((operator, phase)), later.get((operator, phase))
        about = was or will or {}
        rows.append(
            OperatorRow(
                operator=operator,
                phase=phase,
                before_ms=was["ms"] if was else None,
                after_ms=will["ms"] if will else None,
                time_share=was["share"] if was else 0.0,
                roofline_ms=about["roofline"],
                bound=about["bound"],
                gap=was["ms"] / was["roofline"] if was and was["roofline"] else None,
            )
        )
    return tuple(sorted(rows, key=lambda row: -(row.before_ms or 0.0)))


def _sums(profile: Profile, places: Mapping[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Time, share and time at the roofline by operator and phase; the roofline is None where a part's is unknown.

    What stands where a promoted kernel stands in the final stack, by `places` (sites with their kernels' problems),
    counts under that problem's name, in any profile: so what a fused kernel took over is compared with it.
    """

    def name(row: ProfileRow) -> str:
        inside = (kernel for site, kernel in places.items() for own in row.sites if f"{own}.".startswith(f"{site}."))
        return next(inside, row.operator)

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in profile.singles():
        fresh = {"ms": 0.0, "share": 0.0, "roofline": 0.0, "bound": row.bound}
        cell = found.setdefault((name(row), row.phase), fresh)
        cell["ms"] += row.time_ms
        cell["share"] += row.time_share
        unknown = row.roofline_ms is None or cell["roofline"] is None
        cell["roofline"] = None if unknown else cell["roofline"] + row.roofline_ms
    return found


def _profile(stages: Mapping[str, Any]) -> dict[str, Any]:
    if "110-profile" not in stages:
        return {}
    before, after = stages["110-profile"]["profile"], stages.get("905-profile-after")
    kept = {key: before[key] for key in ("attributed_share", "notes")}
    later = after["profile"]["watched_wall_ms"] if after else None
    return kept | {"wall_ms": before["watched_wall_ms"], "after_wall_ms": later}


def _settings_search(search: Mapping[str, Any] | None) -> dict[str, Any]:
    if search is None:
        return {}
    kept = {key: search.get(key) for key in ("reason", "drift", "stopped", "default_first", "default_last")}
    return {"best": search["best"]["knobs"]} | kept


def _stack_report(folder: Path, stages: Mapping[str, Any], evaluations: list[dict[str, Any]]) -> StackReport | None:
    stack = _stack(stages)
    if stack is None or (not stack.kernels and not stack.settings.knobs):
        return None
    final = stages.get("900-final") or {}
    decision = (final.get("decision") or {}).get("decision")
    tests = [e["comparison"] for e in evaluations if e["promoted"]] + [final.get("comparison") or {}]
    counts = {count["candidate"]: count for test in tests for count in test.get("counts", ())}
    kernels = []
    for kernel in stack.kernels:
        count = counts.get(kernel.candidate.id, {})
        kernels.append(
            KernelInStack(
                problem=kernel.problem.name,
                operator=kernel.problem.operator,
                candidate_id=kernel.candidate.id,
                verdict_id=kernel.verdict_id,
                language=kernel.candidate.language,
                file=f"stack/{kernel_file(kernel)}",
                shapes=tuple(dict(shape) for shape in kernel.judged),
                taken=count.get("taken"),
                fell_back=count.get("fell_back"),
                prepare_s=count.get("prepare_s"),
                prepared_bytes=count.get("prepared_bytes"),
            )
        )
    return StackReport(
        stack_id=stack.id,
        folder=f"runs/{folder.name}/stack",
        standing="provisional" if decision is None else "confirmed" if decision == "promoted" else "rejected",
        settings=dict(stack.settings.knobs),
        kernels=tuple(kernels),
    )


def _noise(target: Mapping[str, Any] | None, comparison: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if target:
        measured = target["target"]
        quiet = "from a datasheet" if measured["origin"] == "datasheet" else "measured on a quiet machine"
        found["ceilings"] = measured["noise"] if measured["noisy"] else quiet
    if comparison:
        found["stock against itself, per round"] = f"{100 * comparison['a_spread']:.1f} %"
    return found


def _budget(run: RunState, folder: Path) -> BudgetReport:
    spent = (read_json(folder / "clock.json") or {}).get("spent_s", 0.0)
    by_stage: dict[str, float] = {}
    for stage in run.stages():
        by_stage[stage["title"]] = by_stage.get(stage["title"], 0.0) + float(stage["seconds"])
    return BudgetReport(wall_s=run.record.workload.budget.wall_s, used_s=spent, by_stage_s=by_stage)
