"""From a profile to problems: what each operator of the model is as a kernel problem, and what it could win."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernels.problems import build
from kernels.problems.operators import OPERATORS
from kernels.ruler.spec import Problem
from profiles.engines.base import Engine, GenerateRequest
from profiles.operators import Profile, ProfileRow, analyse
from profiles.target import Target
from tasks.agents.protocol import Opportunity

MOST_SHAPES = 4
"""Visible shapes of one problem: those that take most of the time. The ruler's hidden shapes lie around them."""


class Found(NamedTuple):
    """What a profile offers to the planner."""

    opportunities: tuple[Opportunity, ...]
    """By falling time share; each has a template family."""
    no_executor: tuple[ProfileRow, ...]
    """Operators that no template family works on yet, by falling time share."""


def profile_engine(
    engine: Engine, requests: Sequence[GenerateRequest], out: Path, target: Target, threads: int
) -> Profile:
    """Serve the requests under the engine's profiler, keep the raw table at `out`, and analyse it.

    Raises:
        EngineFailure: the engine could not.
        InconsistentProfile: the table contradicts itself.
    """
    engine.profile(requests, out)
    return analyse(json.loads(out.read_text()), target, threads)


def problems(profile: Profile, *, seed: int | None = None) -> list[tuple[Problem, ProfileRow]]:
    """The kernel problems of a profile, each with the sum of the rows that it came from, by falling time.

    Rows that differ only in axes that vary from call to call (batch, tokens) and in their place in the model are one
    problem: `linear n=1536 k=576` at m ∈ {8, 1024}. The first visible shape is the one that takes most time. Glue and
    operators without a problem are left out (`opportunities` lists them).

    Args:
        profile: where the time went.
        seed: draws the hidden shapes; None draws them in secret, as a real run must.
    """
    groups: dict[tuple[object, ...], list[ProfileRow]] = defaultdict(list)
    for row in profile.rows:
        if row.operator in OPERATORS and row.kind != "unattributed":
            groups[row.kind, row.operator, row.dtype, tuple(sorted(_constants(row).items()))].append(row)
    found = []
    for rows in groups.values():
        first, variable = rows[0], OPERATORS[rows[0].operator].variable
        shapes: dict[tuple[int, ...], float] = defaultdict(float)
        for row in rows:
            shapes[tuple(row.axes[axis] for axis in variable)] += row.time_ms
        visible = [dict(zip(variable, shape, strict=True)) for shape in sorted(shapes, key=lambda s: -shapes[s])]
        problem = build(
            first.operator, dtype=first.dtype, visible=visible[:MOST_SHAPES], seed=seed,
            scalars={"eps": profile.eps} if "eps" in OPERATORS[first.operator].scalars else None, **_constants(first),
        )  # fmt: skip
        found.append((problem, _merged(rows, {**_constants(first), **visible[0]})))
    return sorted(found, key=lambda pair: -pair[1].time_ms)


def opportunities(profile: Profile, *, seed: int | None = None) -> Found:
    """What the planner gets: problems that a template family works on, and the operators that none does."""
    from kernels.templates import families

    offered, lacking = [], []
    for problem, row in problems(profile, seed=seed):
        names = tuple(family.name for family in families(problem.operator) if family.supported(problem))
        if not names:
            lacking.append(row)
            continue
        offered.append(
            Opportunity(
                problem=problem,
                shape=dict(problem.visible[0]),
                time_share=row.time_share,
                headroom=None if row.gap is None else max(1.0, row.gap),
                bound=row.bound,
                measured_us=row.time_ms * 1e3 / row.calls,
                calls=row.calls,
                families=names,
                sites=row.sites,
                covers=row.covers,
            )
        )
    lacking += [row for row in profile.rows if row.operator not in OPERATORS and row.kind != "unattributed"]
    return Found(tuple(offered), tuple(sorted(lacking, key=lambda row: -row.time_share)))


def _constants(row: ProfileRow) -> dict[str, Any]:
    """Axes that the model's weights fix."""
    operator = OPERATORS[row.operator]
    return {axis: row.axes[axis] for axis in operator.axes if axis not in operator.variable}


def _merged(rows: Sequence[ProfileRow], axes: dict[str, int]) -> ProfileRow:
    """Rows of one problem as one: totals, and the bound of the largest."""
    largest = max(rows, key=lambda row: row.time_ms)
    flops, read, written = (
        sum(getattr(row, name) or 0.0 for row in rows) for name in ("flops", "bytes_read", "bytes_written")
    )
    roofline = [row.roofline_ms for row in rows if row.roofline_ms is not None]
    time_ms = sum(row.time_ms for row in rows)
    roofline_ms = sum(roofline) if len(roofline) == len(rows) else None
    return largest.model_copy(
        update={
            "role": "+".join(dict.fromkeys(row.role for row in rows)),
            "phase": "+".join(sorted({row.phase for row in rows})),
            "axes": axes,
            "calls": sum(row.calls for row in rows),
            "time_ms": time_ms,
            "time_share": sum(row.time_share for row in rows),
            "flops": flops,
            "bytes_read": read,
            "bytes_written": written,
            "intensity": flops / (read + written),
            "roofline_ms": roofline_ms,
            "gap": time_ms / roofline_ms if roofline_ms else None,
            "sites": tuple(dict.fromkeys(site for row in rows for site in row.sites)),
            "covers": largest.covers,
            "kernel": next((row.kernel for row in rows if row.kernel), ""),
        }
    )
