"""The report's pictures, as PNG bytes: one measure a picture, words beside the marks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.propose import MEASURED
from tasks.report_schema import Interval, LayerGain, OperatorRow
from tasks.report_words import known, metric_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BEFORE, AFTER, BAD = "#9aa5b1", "#0b7285", "#c92a2a"


def by_layer_figure(layers: Sequence[LayerGain], total: Interval | None) -> bytes:
    """Ratios over the stack without that layer, and the whole, as dots with their intervals. 1.0 is 'no gain'."""
    rows: list[tuple[str, Interval]] = [(layer.layer, layer.ratio) for layer in layers if layer.ratio is not None]
    if total is not None:
        rows.append(("whole stack", total))
    figure, axes = _canvas(height=0.7 + 0.45 * max(len(rows), 1))
    for y, (_, ratio) in enumerate(reversed(rows)):
        colour = AFTER if ratio.low > 1 else MUTED if ratio.high >= 1 else BAD
        axes.plot([ratio.low, ratio.high], [y, y], color=colour, linewidth=3, solid_capstyle="round")
        axes.plot([ratio.estimate], [y], "o", color=colour, markersize=8)
        axes.annotate(
            f"{ratio.estimate:.2f}×  [{ratio.low:.2f}, {ratio.high:.2f}]",
            (ratio.high, y),
            textcoords="offset points",
            xytext=(10, 0),
            va="center",
            color=INK,
            fontsize=9,
        )
        axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axvline(1.0, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    highest = max((ratio.high for _, ratio in rows), default=1.0)
    axes.set_xlim(min([0.9, *(ratio.low - 0.05 for _, ratio in rows)]), 1 + (highest - 1) * 1.5 + 0.15)
    axes.set_xlabel("times faster than without it")
    return _png(figure)


def operators_figure(rows: Sequence[OperatorRow], most: int = 12) -> bytes:
    """Milliseconds by operator: before, after, and at the roofline; those that take most of the time."""
    shown = sorted(rows, key=lambda row: -max(row.before_ms or 0, row.after_ms or 0))[:most]
    afterwards = any(row.after_ms is not None for row in shown)
    figure, axes = _canvas(height=1.1 + (0.42 if afterwards else 0.3) * max(len(shown), 1))
    place, height = (0.18, 0.3) if afterwards else (0.0, 0.5)
    for y, row in enumerate(reversed(shown)):
        if row.before_ms is not None:
            axes.barh(y + place, row.before_ms, height=height, color=BEFORE)
        if row.after_ms is not None:
            axes.barh(y - place, row.after_ms, height=height, color=AFTER)
        if row.roofline_ms is not None:
            axes.plot([row.roofline_ms] * 2, [y - 0.38, y + 0.38], color=INK, linewidth=1.5)
    axes.barh([0], [0], color=BEFORE, label="before any kernel")
    if afterwards:
        axes.barh([0], [0], color=AFTER, label="final stack")
    axes.plot([], [], color=INK, linewidth=1.5, label="at the roofline")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    names = [f"{row.operator} · {row.phase}".strip(" ·").replace("_", " ") for row in reversed(shown)]
    axes.set_yticks(range(len(shown)), names)
    axes.set_xlabel("milliseconds in one profiled round")
    axes.set_ylim(-0.6, len(shown) - 0.4)
    return _png(figure)


def trials_figure(trials: Sequence[dict[str, Any]], metric: str) -> bytes:
    """The objective by trial: kept trials as dots, failures as crosses on the axis, the best so far as a line."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _canvas(height=2.8)
    done = [(t["number"], t["value"]) for t in trials if t["value"] is not None and t["status"] != "gate_failed"]
    stock = [t for t in trials if t["value"] is not None and t["role"] != "search"]
    failed = [t for t in trials if t["status"] not in MEASURED]
    if done:
        numbers, values = zip(*done, strict=True)
        axes.plot(numbers, values, "o", color=AFTER, markersize=6)
        lower_is_better = metric.endswith("_ms")
        best: list[float] = []
        for value in values:
            best.append(value if not best else (min if lower_is_better else max)(best[-1], value))
        axes.step(numbers, best, where="post", color=INK, linewidth=1)
    for trial in stock:
        again = " again" if trial["role"] == "default_again" else ""
        axes.annotate(f"stock{again}", (trial["number"], trial["value"]), textcoords="offset points", xytext=(0, -15),
                      fontsize=9, color=MUTED, ha="center")  # fmt: skip
    for trial in failed:
        axes.plot([trial["number"]], [0], "x", color=BAD, markersize=8, clip_on=False)
        axes.annotate(str(trial["status"]).replace("_", " "), (trial["number"], 0), textcoords="offset points",
                      xytext=(0, 9), rotation=90, fontsize=8, color=BAD, ha="center")  # fmt: skip
    axes.set_ylim(0, 1.15 * max((value for _, value in done), default=1.0))
    axes.set_xlim(min(t["number"] for t in trials) - 0.5, max(t["number"] for t in trials) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel(metric_unit(metric))
    return _png(figure)


def attempts_figure(attempts: Sequence[dict[str, Any]]) -> bytes:
    """Speed-up by attempt, alone: screening as rings, confirmation as dots, what was not valid as crosses below."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _canvas(height=2.6)
    axes.axhline(1.0, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    highest = 1.2
    for attempt in attempts:
        x, estimate = attempt["number"], attempt["speedup"]
        if attempt["status"] != "valid" or estimate is None:
            axes.plot([x], [0], "x", color=BAD, markersize=8, clip_on=False)
            axes.annotate(str(attempt["status"]).replace("_", " "), (x, 0), textcoords="offset points", xytext=(0, 9),
                          rotation=90, fontsize=8, color=BAD, ha="center")  # fmt: skip
            continue
        confirming = attempt["mode"] == "confirm"
        if known(attempt["low"], attempt["high"]):
            axes.plot([x, x], [attempt["low"], attempt["high"]], color=AFTER, linewidth=2)
            highest = max(highest, attempt["high"])
        axes.plot([x], [estimate], "o", color=AFTER, markersize=7, markerfacecolor=AFTER if confirming else "white")
        highest = max(highest, estimate)
    axes.set_ylim(0, 1.1 * highest)
    axes.set_xlim(0.5, max((attempt["number"] for attempt in attempts), default=1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("attempt  (ring: screened, dot: confirmed, cross: no valid measurement)")
    axes.set_ylabel("times faster, alone")
    return _png(figure)


def _canvas(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()
