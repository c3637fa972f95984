"""What a person reads in the Prefect UI: one page per run, one per campaign, under keys that stay."""

from __future__ import annotations

import re

from prefect.artifacts import create_markdown_artifact

from kb.store import Store
from tasks import report_markdown
from tasks.report import build_report, figures_of
from tasks.run_state import RunState


def run_page(run: RunState, store: Store) -> None:
    """The run's page; its history accumulates under the workload's key."""
    report = build_report(run.folder, store)
    text = report_markdown.run_markdown(report, figures_of(report, run.folder, store))
    create_markdown_artifact(text, key=_key("run", run.record.workload.name), description=f"Run {run.run_id}")


def campaign_page(run: RunState, campaign_id: str, store: Store) -> None:
    """One campaign's page."""
    text = report_markdown.campaign_markdown(run.folder, campaign_id)
    create_markdown_artifact(text, key=_key("campaign", campaign_id), description=f"Campaign {campaign_id}")


def _key(*parts: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
