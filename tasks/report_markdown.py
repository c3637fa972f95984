"""The report as the Prefect UI shows it: markdown with tables, pictures as data URIs."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.report_campaigns import attempts_of
from tasks.report_figures import attempts_figure
from tasks.report_schema import Interval, Report
from tasks.report_words import metric_name, metric_unit, number, pairs, ratio
from tasks.run_state import read_json


def run_markdown(report: Report, figures: Mapping[str, bytes]) -> str:
    """A run on one page: headline, layers, campaigns, what was refused."""
    lines = [
        f"# {_cell(report.workload['name'])} on {_cell(report.target.get('device', '?'))}",
        _head(report),
        "",
        f"Accuracy gate: **{report.accuracy['status']}**. {_cell(report.accuracy['reason'])}",
        "",
        _cell(report.stop_reason),
        "",
        "| layer | gain | from |",
        "|---|---|---|",
        *(f"| {gain.layer} | {_ratio(gain.ratio)} | {_cell(gain.how)} |" for gain in report.by_layer),
        "",
        _picture("gain by layer", figures.get("by_layer")),
        "| campaign | conclusion | alone | end to end | reason |",
        "|---|---|---|---|---|",
        *(
            f"| {_cell(c.problem)} · {_cell(c.lever)} | {c.decision or c.conclusion.replace('_', ' ')} | "
            f"{_ratio(c.speedup)} | {_ratio(c.end_to_end)} | {_cell(c.reason)} |"
            for c in report.campaigns
        ),
        "",
        _picture("time per operator", figures.get("operators")),
        _picture("roofline", figures.get("roofline")),
        _picture("tree of ideas", figures.get("ideas")),
        "| refused | by | reason |",
        "|---|---|---|",
        *(f"| {_cell(x.what)} | {x.stage.replace('_', ' ')} | {_cell(x.reason)} |" for x in report.refused),
        "",
        f"The whole report: `runs/{report.run_id}/report.html`. Run {report.run_id}.",
    ]
    return "\n".join(lines)


def campaign_markdown(folder: Path, campaign_id: str) -> str:
    """A campaign on one page; the first line says what it came to, or why it failed.

    Args:
        folder: of the run.
        campaign_id: one of its campaigns; of one that has not begun there is little to tell.
    """
    home = folder / "campaigns" / campaign_id
    task = (read_json(home / "campaign.json") or {}).get("task", {})
    outcome = read_json(home / "outcome.json") or {}
    idea: Mapping[str, Any] = task.get("idea", {})
    conclusion = str(outcome.get("conclusion", "unfinished")).replace("_", " ")
    alone = ratio(outcome["speedup"], outcome["low"], outcome["high"]) if outcome.get("speedup") else ""
    attempts = attempts_of(home)
    head = f"**{conclusion}**, {alone} alone" if alone else f"**{conclusion}**"
    lines = [
        f"{head}: {_cell(outcome.get('reason', 'it has not concluded'))}",
        "",
        f"# {_cell(task.get('problem', {}).get('name', campaign_id))}",
        f"{_cell(idea.get('hypothesis', ''))} {_cell(idea.get('derivation', ''))}",
        "",
        "| # | mode | verdict | times faster | claim | seconds | parameters | note |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {a['number']} | {a['mode']} | {_cell(str(a['status']).replace('_', ' '))} | "
            f"{ratio(a['speedup'], a['low'], a['high'])} | {number(a['claim'])} | {number(a['seconds'])} | "
            f"{_cell(pairs(a['parameters']))} | {_cell(a['note'])} |"
            for a in attempts
        ),
        "",
        _picture("speed-up by attempt", attempts_figure(attempts) if attempts else None),
        "What the executor was shown:",
        "",
        *(f"    {line}" for line in str(task.get("scope", "")).splitlines()),
        "",
        f"Run it again: `roofloop rerun {campaign_id}`",
    ]
    return "\n".join(lines)


def _head(report: Report) -> str:
    if report.speedup is None:
        return "**Stock stays: nothing was promoted.**" if report.status == "finished" else "**Not measured yet.**"
    name = f"{metric_name(report.metric)} ({metric_unit(report.metric)})"
    head = f"**{_ratio(report.speedup)}** as good as stock in {name}"
    return (
        f"{head}, confirmed in fresh engines" if report.confirmed else f"{head}, **rejected**: {_cell(report.decision)}"
    )


def _ratio(value: Interval | None) -> str:
    return "–" if value is None else ratio(value.estimate, value.low, value.high)


def _cell(text: Any) -> str:
    """Text inside a table cell: no markup, no links or pictures, no line breaks."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;")
    return " ".join(re.sub(r"([\\`*_\[\]|])", r"\\\1", escaped).split())


def _picture(name: str, png: bytes | None) -> str:
    return f"![{name}](data:image/png;base64,{base64.b64encode(png).decode()})\n" if png else ""
