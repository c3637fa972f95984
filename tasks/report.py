"""The report of a run: `report.json`, `report.html` and the stack as files, made from what the run's folder holds.

It can be written at any time: what is not measured yet is left out, never made up.
"""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from kb import ledger, queries
from kb.figures import tree_png
from kb.store import Store
from kernels.errors import InputError
from kernels.ruler.verdict import Verdict, visible
from profiles.engines.base import Stack
from profiles.operators import Profile
from profiles.roofline import Point, roofline_figure
from profiles.target import Target
from tasks import report_figures
from tasks.codec import from_json
from tasks.report_schema import (
    BudgetReport,
    CampaignRow,
    Interval,
    KernelInStack,
    LayerGain,
    MeasuredRow,
    OperatorRow,
    Refusal,
    Report,
    StackReport,
)
from tasks.run_state import RunState, now, open_run, read_json, write_json
from tasks.stack_files import kernel_file, write_stack

DEPLOY = """# settings and kernels: {folder}/stack.json, how to use them: {folder}/README.md
python {folder}/apply.py MODEL_FOLDER

# measure it again on this machine
roofloop optimize {workload} --new"""


def write_report(folder: Path, store: Store) -> Path:
    """Write `report.json`, `report.html` and `stack/` into the run's folder.

    Returns:
        Path of `report.html`.

    Raises:
        InputError: the folder holds no run.
    """
    report = build_report(folder, store)
    write_json(folder / "report.json", report.model_dump(mode="json"))
    stack = _stack(_stages(folder))
    if stack is not None and report.stack is not None:
        write_stack(stack, folder / "stack")
    page = folder / "report.html"
    temporary = folder / ".report.html.tmp"
    temporary.write_text(render(report, figures_of(report, folder, store)), encoding="utf-8")
    temporary.replace(page)
    return page


def render(report: Report, figures: Mapping[str, bytes]) -> str:
    """The report as one self-contained HTML page. Everything that came from elsewhere is escaped."""
    environment = Environment(loader=PackageLoader("tasks"), autoescape=select_autoescape(default=True))
    deploy = ""
    if report.stack is not None:
        deploy = DEPLOY.format(folder=report.stack.folder, workload=report.workload["name"])
    encoded = {name: base64.b64encode(png).decode() for name, png in figures.items()}
    return environment.get_template("report.html.j2").render(
        r=report, fmt=number, words=words, figures=encoded, deploy=deploy
    )


def number(value: Any) -> str:
    """A figure with three significant digits, whatever its size; `–` for one that is not there."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == 0 or isinstance(value, int):
        return f"{value:,}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if digits <= 5 else f"{value:.2e}"


def words(value: Mapping[str, Any] | None) -> str:
    """A mapping as `key value, key value`."""
    if not value:
        return "–"
    return ", ".join(f"{key} {number(held)}" for key, held in value.items())


def build_report(folder: Path, store: Store) -> Report:
    """Gather everything that the run has found out so far.

    Raises:
        InputError: the folder holds no run.
    """
    run, stages = open_run(folder), _stages(folder)
    target, search, base = stages.get("010-target"), stages.get("040-settings"), stages.get("030-baseline")
    final = stages.get("900-final")
    comparison = (final or {}).get("comparison")
    speedup = _interval(comparison["interval"] if comparison else None)
    campaigns = _campaigns(folder, stages)
    layers = _by_layer(search, stages, speedup)
    return Report(
        run_id=run.run_id,
        workload=run.record.workload.model_dump(mode="json"),
        target=target["target"] if target else {"device": "unknown"},
        status={"finished": "finished", "failed": "failed"}.get(run.record.status, "unfinished"),
        stop_reason=run.record.reason or ((final or {}).get("stop_reason") or ""),
        metric=run.record.workload.objective,
        speedup=speedup,
        confirmed=bool(final and final["decision"] and final["decision"]["decision"] == "promoted"),
        by_layer=layers,
        accuracy=_accuracy(comparison),
        baseline=_measured("stock", base, comparison, "a"),
        best=_measured("best", base, comparison, "b", _stack(stages)),
        peers=tuple(peer.model_dump(mode="json") for peer in run.record.workload.peers),
        operators=_operators(stages),
        trials=tuple(_trial(row) for row in (search or {}).get("trials", ())),
        ideas=_ideas(store, run.run_id),
        campaigns=campaigns,
        refused=_refused(search, campaigns, stages),
        stack=_stack_report(folder, stages, comparison),
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
        figures["ideas"] = tree_png(queries.tree(store, report.run_id))
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


def _stages(folder: Path) -> dict[str, Any]:
    """Results of the finished stages, by name, in order."""
    held = ((file.stem, read_json(file)) for file in sorted((folder / "stages").glob("*.json")))
    return {name: value["result"] for name, value in held if isinstance(value, dict) and "result" in value}


def _stack(stages: Mapping[str, Any]) -> Stack | None:
    if "900-final" in stages:
        return from_json(Stack, stages["900-final"]["stack"])
    evaluated = [result for name, result in stages.items() if "-evaluate-" in name or "40-evaluate" in name]
    if evaluated:
        return from_json(Stack, evaluated[-1]["stack"])
    search = stages.get("040-settings")
    return from_json(Stack, {"settings": search["best"], "kernels": ()}) if search else None


def _interval(value: Mapping[str, Any] | None) -> Interval | None:
    if not value:
        return None
    return Interval(
        estimate=value["estimate"],
        low=value["low"],
        high=value["high"],
        n=value.get("n") or 0,
        level=value.get("level") or 0.95,
    )


def _by_layer(
    search: Mapping[str, Any] | None, stages: Mapping[str, Any], whole: Interval | None
) -> tuple[LayerGain, ...]:  # fmt: skip
    settings = next((c for c in (search or {}).get("confirmations", ()) if c["better"]), None)
    first = LayerGain(
        layer="settings",
        ratio=Interval(estimate=settings["ratio"], low=settings["low"], high=settings["high"]) if settings else None,
        how="the best settings against the defaults, interleaved" if settings else (search or {}).get("reason", ""),
    )
    won = [r for name, r in stages.items() if "40-evaluate-" in name and r["promoted"]]
    kernels = _product([_interval(result["comparison"]["interval"]) for result in won])
    how = f"product of {len(won)} comparisons of stack + kernel against stack" if won else "no kernel was promoted"
    if whole and kernels:
        expected = kernels.estimate * (first.ratio.estimate if first.ratio else 1.0)
        low = kernels.low * (first.ratio.low if first.ratio else 1.0)
        high = kernels.high * (first.ratio.high if first.ratio else 1.0)
        if whole.high < low or whole.low > high:
            how += f"; with the settings that makes {expected:.2f}×, which the confirmation does not bear out"
    return first, LayerGain(layer="kernel", ratio=kernels, how=how)


def _product(ratios: list[Interval | None]) -> Interval | None:
    """Product of independent ratios: logs add, half-widths of the logs add in quadrature."""
    known = [ratio for ratio in ratios if ratio]
    if not known:
        return None
    centre = sum(math.log(ratio.estimate) for ratio in known)
    below = math.sqrt(sum(math.log(ratio.estimate / ratio.low) ** 2 for ratio in known))
    above = math.sqrt(sum(math.log(ratio.high / ratio.estimate) ** 2 for ratio in known))
    return Interval(
        estimate=math.exp(centre),
        low=math.exp(centre - below),
        high=math.exp(centre + above),
        n=min(ratio.n for ratio in known),
        level=min(ratio.level for ratio in known),
    )


def _accuracy(comparison: Mapping[str, Any] | None) -> dict[str, Any]:
    held = (comparison or {}).get("accuracy")
    if not held:
        return {"status": "not evaluated", "reason": "no stack was confirmed"}
    checks = {check["name"]: f"{check['status']}: {check['detail']}" for check in held["checks"]}
    return {"status": held["status"], "reason": held["reason"], "scored_tokens": held["scored_tokens"]} | checks


def _measured(
    label: str,
    base: Mapping[str, Any] | None,
    comparison: Mapping[str, Any] | None,
    side: str,
    stack: Stack | None = None,
) -> MeasuredRow | None:
    """The row of one side: from the final confirmation where there is one, stock otherwise from the baseline."""
    if comparison and comparison.get(side):
        resolved, metrics = comparison[side], comparison.get(f"{side}_row") or {}
        value = comparison[f"{side}_value"]
        rounds = len(comparison["pairs"])
        metrics = metrics or {comparison["metric"]: value, "peak_memory_bytes": comparison[f"{side}_peak_memory_bytes"]}
    elif base and side == "a":
        resolved, metrics, rounds = base["resolved"], base["row"], base["rounds"]
    else:
        return None
    from profiles.engines.base import Resolved

    return MeasuredRow(
        label=label,
        stack_id=stack.id if stack else "stock",
        settings=resolved["config"],
        settings_hash=Resolved.model_validate(resolved).hash,
        kernels=tuple(kernel.problem.name for kernel in stack.kernels) if stack else (),
        metrics={key: value for key, value in metrics.items() if not isinstance(value, bool)},
        rounds=rounds,
    )


def _operators(stages: Mapping[str, Any]) -> tuple[OperatorRow, ...]:
    if "110-profile" not in stages:
        return ()
    before = from_json(Profile, stages["110-profile"]["profile"])
    after = from_json(Profile, stages["905-profile-after"]["profile"]) if "905-profile-after" in stages else None
    later = _sums(after) if after else {}
    rows = []
    for key, row in _sums(before).items():
        rows.append(
            OperatorRow(
                operator=key[0],
                phase=key[1],
                before_ms=row["ms"],
                after_ms=later.get(key, {}).get("ms", 0.0) if after else None,
                time_share=row["share"],
                roofline_ms=row["roofline"],
                bound=row["bound"],
                gap=row["ms"] / row["roofline"] if row["roofline"] else None,
            )
        )
    for key, row in later.items():
        if key not in _sums(before):
            rows.append(
                OperatorRow(
                    operator=key[0], phase=key[1], before_ms=None, after_ms=row["ms"], time_share=0.0,
                    roofline_ms=row["roofline"], bound=row["bound"], gap=None,
                )
            )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -(row.before_ms or 0.0)))


def _sums(profile: Profile) -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in profile.singles():
        cell = found.setdefault(
            (row.operator, row.phase), {"ms": 0.0, "share": 0.0, "roofline": 0.0, "bound": row.bound}
        )
        cell["ms"] += row.time_ms
        cell["share"] += row.time_share
        known = row.roofline_ms is not None and cell["roofline"] is not None
        cell["roofline"] = cell["roofline"] + (row.roofline_ms or 0.0) if known else None
    return found


def _trial(trial: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("number", "role", "knobs", "status", "value", "reason", "seconds", "resolved_hash")
    return {key: trial.get(key) for key in keys}


def _ideas(store: Store, run_id: str) -> tuple[dict[str, Any], ...]:
    try:
        rows = queries.tree(store, run_id)
    except InputError:
        return ()
    keys = (
        "id", "parent_id", "depth", "hypothesis", "layer", "lever", "operator", "problem_name", "status", "reason",
        "derivation", "score", "p_success", "gain", "urgency", "accuracy_penalty", "cost_minutes", "excluded",
    )  # fmt: skip
    return tuple({key: row.get(key) for key in keys} for row in rows)


def _campaigns(folder: Path, stages: Mapping[str, Any]) -> tuple[CampaignRow, ...]:
    results: dict[str, tuple[Interval | None, str]] = {}
    for name, result in stages.items():
        if "40-evaluate-" in name:
            for key in result.get("campaigns", ()):
                results[key] = (_interval(result["comparison"]["interval"]), result["decision"]["decision"])
    rows = []
    for path in sorted(folder.glob("campaigns/*/campaign.json"), key=lambda p: p.stat().st_mtime):
        task, outcome = read_json(path), read_json(path.parent / "outcome.json")
        if not task:
            continue
        idea, outcome = task["task"]["idea"], outcome or {}
        end_to_end, decision = results.get(path.parent.name, (None, ""))
        speedup = None
        if outcome.get("speedup") is not None:
            speedup = Interval(estimate=outcome["speedup"], low=outcome["low"], high=outcome["high"])
        said = _verdict(path.parent, outcome)
        rows.append(
            CampaignRow(
                campaign_id=path.parent.name,
                hypothesis=idea["hypothesis"],
                operator=idea["operator"],
                problem=task["task"]["problem"]["name"],
                lever=idea["lever"],
                conclusion=outcome.get("conclusion", "unfinished"),
                reason=outcome.get("reason", "it has not concluded"),
                speedup=speedup,
                claim=said.get("claim"),
                floor_fraction=said.get("floor_fraction"),
                attempts=tuple(_attempt(value) for value in _attempts(path.parent)),
                seconds=outcome.get("seconds", 0.0),
                end_to_end=end_to_end,
                decision=decision,
            )
        )
    return tuple(rows)


def _attempts(folder: Path) -> list[dict[str, Any]]:
    return [value for file in sorted(folder.glob("attempts/*.json")) if (value := read_json(file))]


def _attempt(attempt: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("number", "mode", "status", "speedup", "low", "high", "claim", "parameters", "seconds", "note")
    return {key: attempt.get(key) for key in keys}


def _verdict(folder: Path, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What may be shown of the verdict that the outcome stands on."""
    for mode in ("confirm", "screen"):
        held = read_json(folder / "verdicts" / f"{outcome.get('candidate_id')}.{mode}.json")
        if held:
            return visible(Verdict.from_json(held))
    return {}


def _refused(
    search: Mapping[str, Any] | None, campaigns: tuple[CampaignRow, ...], stages: Mapping[str, Any]
) -> tuple[Refusal, ...]:
    found = []
    for trial in (search or {}).get("trials", ()):
        if trial["status"] not in ("complete", "duplicate"):
            found.append(
                Refusal(
                    what=words(trial["knobs"]), layer="settings", stage="settings",
                    reason=f"{trial['status'].replace('_', ' ')}: {trial['reason']}",
                )
            )  # fmt: skip
    for campaign in campaigns:
        if campaign.conclusion not in ("won", "unfinished"):
            found.append(
                Refusal(what=f"{campaign.problem}, {campaign.lever}", layer="kernel", stage="ruler",
                        reason=f"{campaign.conclusion.replace('_', ' ')}: {campaign.reason}")
            )  # fmt: skip
    for name, result in stages.items():
        if "40-evaluate-" in name and not result["promoted"]:
            names = [c.problem for c in campaigns if c.campaign_id in result.get("campaigns", ())]
            found.append(
                Refusal(what=" + ".join(names), layer="kernel", stage="end_to_end", reason=result["decision"]["reason"])
            )
    for campaign in campaigns:
        if campaign.conclusion == "won" and not campaign.decision:
            found.append(
                Refusal(what=f"{campaign.problem}, {campaign.lever}", layer="kernel", stage="end_to_end",
                        reason="no time was left to measure it end to end")
            )  # fmt: skip
    return tuple(found)


def _stack_report(folder: Path, stages: Mapping[str, Any], comparison: Mapping[str, Any] | None) -> StackReport | None:
    stack = _stack(stages)
    if stack is None or (not stack.kernels and not stack.settings.knobs):
        return None
    counts = {count["candidate"]: count for count in (comparison or {}).get("counts", ())}
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
    where = f"runs/{folder.name}/stack"
    return StackReport(stack_id=stack.id, folder=where, settings=dict(stack.settings.knobs), kernels=tuple(kernels))


def _noise(target: Mapping[str, Any] | None, comparison: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if target:
        noisy = target["target"]["noisy"]
        found["ceilings"] = target["target"]["noise"] if noisy else "measured on a quiet machine"
    if comparison:
        found["stock against itself, per round"] = f"{100 * comparison['a_spread']:.1f} %"
        values = [pair["a"] for pair in comparison["pairs"]]
        if values:
            found["stock, median of the rounds"] = statistics.median(values)
    return found


def _budget(run: RunState, folder: Path) -> BudgetReport:
    spent = (read_json(folder / "clock.json") or {}).get("spent_s", 0.0)
    by_stage = {stage["title"]: float(stage["seconds"]) for stage in run.stages()}
    return BudgetReport(wall_s=run.record.workload.budget.wall_s, used_s=spent, by_stage_s=by_stage)
