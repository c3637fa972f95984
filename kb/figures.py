"""The tree of ideas as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

STYLE: dict[str, tuple[str, str]] = {
    "open": ("#7f7f7f", "o"),
    "running": ("#1f77b4", ">"),
    "succeeded": ("#8fbc3f", "^"),
    "promoted": ("#2ca02c", "*"),
    "deepened": ("#17becf", "P"),
    "failed": ("#d62728", "X"),
    "rejected": ("#ff7f0e", "s"),
    "abandoned": ("#8c564b", "v"),
    "expired": ("#bcbd22", "d"),
}
"""Colour and mark of each status; the mark alone tells them apart."""


def tree_png(rows: Sequence[dict[str, Any]]) -> bytes:
    """Draw the tree as a PNG: one line per idea, indented by depth, status by colour and by mark, score and gain.

    Args:
        rows: of `kb.queries.tree`.
    """
    height = 1.0 + 0.34 * max(1, len(rows))
    figure = Figure(figsize=(11.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        x, y = row["depth"] * 0.35, -float(number)
        places[row["id"]] = (x, y)
        if row["parent_id"] in places:
            above, top = places[row["parent_id"]]
            axes.plot([above, above, x], [top, y, y], color="#bbbbbb", linewidth=1, zorder=1)
        colour, mark = STYLE[row["status"]]
        axes.scatter([x], [y], color=colour, marker=mark, s=90, zorder=2)
        name = f"{row['lever']}  {row['problem_name'] or ''}"
        axes.text(x + 0.12, y, name[:70], va="center", fontsize=9)
        score, gain = row.get("score"), row.get("gain")
        figures = "not scored" if score is None else f"score {score:.4f}   gain ≤ {gain:.1%}"
        axes.text(4.6, y, f"{row['status']}", va="center", fontsize=9, color=colour, fontweight="bold")
        axes.text(5.5, y, figures, va="center", fontsize=9)
    used = [status for status in STYLE if any(row["status"] == status for row in rows)]
    for status in used:
        axes.scatter([], [], color=STYLE[status][0], marker=STYLE[status][1], s=70, label=status)
    if used:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(used), frameon=False, fontsize=9)
    axes.set_xlim(-0.2, 7.4)
    axes.set_ylim(-len(rows) + 0.3, 0.7)
    axes.axis("off")
    out = BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
