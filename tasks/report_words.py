"""Figures and names as a reader sees them: three digits, units, no field names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from profiles.rounds import COLUMNS

MOST_RATIO = 1e6
"""An interval that reaches this far, or down to 0, says that nothing is known."""
_LATENCY = {
    "ttft": "time to the first token",
    "tpot": "time per output token",
    "itl": "gap between tokens",
    "e2el": "time to the last token",
}
_STATISTIC = {"mean": "mean", "p50": "median", "p95": "95th percentile", "p99": "99th percentile"}
_NAMES = {
    "output_tokens_per_s": "output tokens per second",
    "total_tokens_per_s": "tokens per second, in and out",
    "requests_per_s": "requests per second",
    "goodput_rps": "requests per second within the limits",
    "completed": "requests completed",
    "failed": "requests failed",
    "duration_s": "duration of the rounds",
    "peak_memory_bytes": "peak memory",
    "max_send_lag_ms": "latest sending of a request",
    "input_tokens": "tokens in",
    "output_tokens": "tokens out",
}
_CHECKS = {
    "engine_tokens": "tokens scored",
    "stock_tokens": "tokens of stock scored",
    "regret_increase_nats": "mean regret, increase over stock (nats)",
    "top1_share_drop": "top-1 agreement, drop from stock (share)",
    "distinct_ratio": "different tokens, of stock's",
    "kl_increase_nats": "mean KL divergence, increase over stock (nats)",
}


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


def pairs(value: Mapping[str, Any] | None) -> str:
    """A mapping as `cache = static, threads = 2`; empty for an empty one. Values are spelled out, not rounded."""
    return ", ".join(f"{key} = {_spelled(held)}" for key, held in (value or {}).items())


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return number(value) if isinstance(value, float) else str(value)


def known(low: float | None, high: float | None) -> bool:
    """Whether an interval says anything."""
    return low is not None and high is not None and low > 0 and high < MOST_RATIO


def ratio(estimate: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval in words: `1.35× [1.27, 1.43]`."""
    if estimate is None:
        return "–"
    if low is None or high is None or not known(low, high):
        return f"{estimate:.2f}× [unresolved]"
    return f"{estimate:.2f}× [{low:.2f}, {high:.2f}]"


def metric_name(name: str) -> str:
    """A metric by what it is, without its unit: `ttft_ms_p50` is `time to the first token, median`."""
    kind, _, statistic = name.partition("_ms")
    if kind in _LATENCY and name != kind:
        return f"{_LATENCY[kind]}, {_STATISTIC.get(statistic.strip('_'), 'mean')}"
    return _NAMES.get(name, name.replace("_", " "))


def metric_unit(name: str) -> str:
    """The unit that `metric_value` shows a metric in."""
    if name.endswith("_bytes"):
        return "GiB"
    return "ms" if "_ms" in name else COLUMNS.get(name, ("", ""))[0]


def metric_value(name: str, value: float | None) -> str:
    """A metric's figure in that unit."""
    if value is not None and metric_unit(name) in ("requests", "tokens"):
        return number(round(value))
    return number(value / 2**30 if value is not None and name.endswith("_bytes") else value)


def check_name(name: str) -> str:
    """A check of the accuracy gate by what it asks."""
    if name.startswith("calls:"):
        return f"calls of kernel {name.removeprefix('calls:')}"
    return _CHECKS.get(name, name.replace("_", " "))
