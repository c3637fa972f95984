"""The time of day as records have it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def now() -> str:
    """ISO 8601 in UTC with microseconds; sorts as text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def later(at: str, days: float) -> str:
    """`at` plus some days."""
    return (datetime.fromisoformat(at) + timedelta(days=days)).isoformat(timespec="microseconds")
