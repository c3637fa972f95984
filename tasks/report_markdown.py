"""The report as the Prefect UI shows it: markdown with tables, pictures as data URIs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.report_schema import Interval, Report
from tasks.run_state import read_json


def run_markdown(report: Report, figures: Mapping[str, bytes]) -> str:
    """A run on one page: headline, layers, campaigns, what was refused."""
    head = (
        f"**{_ratio(report.speedup)}** {report.metric} over stock"
        if report.speedup
        else "**No confirmed speed-up yet.**"
    )
    lines = [
        f"# {_cell(report.workload['name'])} on {_cell(report.target.get('device', '?'))}",
        head + (", confirmed in fresh engines" if report.confirmed else ""),
        "",
        f"Accuracy gate: **{report.accuracy.get('status')}**. {_cell(report.stop_reason)}",
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
    """A campaign on one page; the first line says what it came to, or why it failed."""
    home = folder / "campaigns" / campaign_id
    task = (read_json(home / "campaign.json") or {}).get("task", {})
    outcome = read_json(home / "outcome.json") or {}
    idea: Mapping[str, Any] = task.get("idea", {})
    conclusion = str(outcome.get("conclusion", "unfinished")).replace("_", " ")
    attempts = [value for file in sorted((home / "attempts").glob("*.json")) if (value := read_json(file))]
    lines = [
        f"**{conclusion}**: {_cell(outcome.get('reason', 'it has not concluded'))}",
        "",
        f"# {_cell(task.get('problem', {}).get('name', campaign_id))}",
        f"{_cell(idea.get('hypothesis', ''))} {_cell(idea.get('derivation', ''))}",
        "",
        "| # | mode | verdict | speed-up | claim | parameters | note |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {a['number']} | {a['mode']} | {a['status'].replace('_', ' ')} | {_of(a)} | {_figure(a['claim'])} | "
            f"{_cell(', '.join(f'{k}={v}' for k, v in a['parameters'].items()))} | {_cell(a['note'])} |"
            for a in attempts
        ),
        "",
        "What the executor was shown:",
        "",
        *(f"    {line}" for line in str(task.get("scope", "")).splitlines()),
        "",
        f"Run it again: `roofloop rerun {campaign_id}`",
    ]
    return "\n".join(lines)


def _ratio(value: Interval | None) -> str:
    return "–" if value is None else f"{value.estimate:.2f}× [{value.low:.2f}, {value.high:.2f}]"


def _of(attempt: Mapping[str, Any]) -> str:
    if attempt["speedup"] is None:
        return "–"
    return f"{attempt['speedup']:.2f}× [{attempt['low']:.2f}, {attempt['high']:.2f}]"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _cell(text: Any) -> str:
    """Text inside a table cell: no markup, no line breaks."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(escaped.split())


def _picture(name: str, png: bytes | None) -> str:
    return f"![{name}](data:image/png;base64,{base64.b64encode(png).decode()})\n" if png else ""
