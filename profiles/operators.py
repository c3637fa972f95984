"""A profile: per operator and shape, where the time of a round goes and how far that is from the roofline.

Two kinds of rows share the wall time differently. `single` rows and the one `unattributed` row add up to it. `fused`
rows are what one kernel could do in the place of several singles: their time is the sum of their parts (so they overlap
with them), their roofline that of the fused operator, which neither writes nor reads what its parts hand to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from kernels.problems.operators import OPERATORS, VALUE
from kernels.ruler.spec import Cost
from profiles.operators_child import SCHEMA_VERSION, collect_in_child
from profiles.records import Record
from profiles.target import Target

__all__ = ["AtenRow", "InconsistentProfile", "Profile", "ProfileRow", "analyse", "collect_in_child", "cost_of"]

MOST_ATTRIBUTED = 1.03
"""Self times come from one clock and nest: together they cannot exceed the wall time by more than this."""
DISAGREEMENT = 0.2
"""Difference between the watched and the untouched round above which the profile says so."""
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}

# Fewest operations and bytes of what `kernels.problems` has no problem for; B is the size of an element. Sources:
# counted from the definition of each operator; weights read once, nothing written between the parts of a fused one.
_VISIBLE = "(queries*length-queries*(queries-1)/2)"  # pairs that a causal mask leaves
_COSTS: Mapping[str, Cost] = {
    # Every position of the cache, where the problem's own counts the mean of what the ruler draws: a gap is rather
    # understated (by the empty end of a static cache) than a goal that no kernel could reach.
    "attention_decode": Cost(
        "4*batch*heads*length*dim",
        "B*batch*dim*(heads+2*kv_heads*length)",
        "B*batch*heads*dim",
        VALUE,
    ),
    "attention_prefill": Cost(
        f"4*batch*heads*dim*{_VISIBLE}",
        "B*batch*dim*(heads*queries+2*kv_heads*length)",
        "B*batch*heads*queries*dim",
        VALUE,
    ),
    "cache_update": Cost("0", "2*B*batch*kv_heads*new*dim", "2*B*batch*kv_heads*new*dim"),
    "embedding": Cost("0", "B*rows*cols+8*rows", "B*rows*cols"),
    "residual_add": Cost("2*rows*cols", "4*B*rows*cols", "2*B*rows*cols"),  # two in a layer
    "rotary_table": Cost("3*rows*dim", "8*rows", "2*B*rows*dim"),
    "rotary_attention": Cost(
        "4*batch*heads*length*dim+3*batch*(heads+kv_heads)*dim",
        "B*batch*((heads+2*kv_heads)*dim+2*kv_heads*(length-1)*dim+2*dim)",
        "B*batch*(heads+2*kv_heads)*dim",
        VALUE,
    ),
    "rmsnorm_mlp": Cost("6*m*hidden*inner", "B*(m*hidden+hidden+3*hidden*inner)", "B*m*hidden", VALUE),
    "lm_head_argmax": Cost("2*m*n*k", "B*(m*k+k+n*k)", "8*m", VALUE),
}


class InconsistentProfile(RuntimeError):
    """More time was attributed than passed: the profile cannot be believed and must be taken again."""


class AtenRow(Record):
    """A torch operator inside an operator's site: evidence of what a site's time is made of."""

    operator: str
    role: str
    phase: str
    aten: str
    calls_per_forward: float
    self_ms_per_forward: float
    """Under torch's profiler, which slows small operators down: for proportions, not for sums."""
    shapes: str
    """Commonest input shapes."""


class ProfileRow(Record):
    """One operator at one shape in one phase. Times, operations and bytes are totals over `calls`."""

    kind: Literal["single", "fused", "unattributed"]
    operator: str
    role: str
    """Which of the model's: `q`, `gate`, `input_layernorm`; parts joined by `+`."""
    phase: str
    """`prefill` or `decode`; empty for what is not attributed."""
    dtype: str
    axes: dict[str, int]
    """All axes, named as in `kernels.problems`; a cache length is the mean of its group."""
    calls: int
    time_ms: float
    time_share: float
    """Of the watched round's wall time."""
    flops: float | None = None
    """None where the operator has no cost model (glue between operators: Python, views, transposes)."""
    bytes_read: float | None = None
    bytes_written: float | None = None
    intensity: float | None = None
    """Operations per byte."""
    bound: Literal["memory", "compute", "overhead"] = "overhead"
    roofline_ms: float | None = None
    """None without a cost model or without trusted ceilings."""
    gap: float | None = None
    """time_ms / roofline_ms."""
    sites: tuple[str, ...] = ()
    """Where in the model: `model.layers.*.mlp.gate_proj`."""
    covers: tuple[str, ...] = ()
    """Operators that a fused row takes in."""
    kernel: str = ""
    """Name of the problem whose promoted kernel stands at the site: the time is (also) the kernel's."""


class Profile(Record):
    """Where one round's time went."""

    schema_version: Literal[1] = 1
    rows: tuple[ProfileRow, ...]
    """Singles, then what is not attributed, then fused; each by falling time."""
    aten: tuple[AtenRow, ...] = ()
    wall_ms: float
    """Of the untouched round."""
    watched_wall_ms: float
    """Of the round under stopwatches, their own time taken out."""
    watch_overhead_ms: float
    """What was taken out."""
    attributed_share: float
    unattributed_ms: float
    forwards: dict[str, int]
    """Forwards of the whole model by phase."""
    threads: int
    dtype: str
    eps: float
    """Epsilon of the model's norms."""
    compiled: bool
    """The untouched round ran compiled graphs; the watched one ran the same modules eagerly."""
    overlaid: bool
    notes: tuple[str, ...] = Field(default=())
    """What a reader must know before believing a number."""

    def singles(self) -> tuple[ProfileRow, ...]:
        """Rows that add up to the wall time, the unattributed one among them."""
        return tuple(row for row in self.rows if row.kind != "fused")


class _Cell(NamedTuple):
    """A raw row with its axes as the problems name them."""

    operator: str
    role: str
    phase: str
    dtype: str
    axes: dict[str, int]
    calls: int
    seconds: float
    site: str
    kernel: str


def analyse(raw: Mapping[str, Any], target: Target, threads: int) -> Profile:
    """Turn what `collect_in_child` measured into a profile against the ceilings of `target`.

    Args:
        raw: the table that the engine's process wrote.
        target: ceilings; where they were measured on a busy machine, the gaps are lower bounds and a note says so.
        threads: threads that the engine computes with.

    Raises:
        InconsistentProfile: the attributed time exceeds the wall time, or the table is of another version.
    """
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise InconsistentProfile(f"the operator table has version {raw.get('schema_version')}, not {SCHEMA_VERSION}")
    wall_s, cells = float(raw["watched_wall_s"]), [_cell(row) for row in raw["rows"]]
    attributed_s = sum(cell.seconds for cell in cells)
    if not 0 < attributed_s <= MOST_ATTRIBUTED * wall_s:
        raise InconsistentProfile(f"operators took {attributed_s:.3f} s of a round that took {wall_s:.3f} s")
    rest_s = max(0.0, wall_s - attributed_s)
    total_s = attributed_s + rest_s
    ruler = _Roofline(target, threads, total_s)
    singles = [ruler.row("single", cell, (cell.site,), ()) for cell in cells]
    fused = [ruler.row("fused", cell, sites, covers) for cell, sites, covers in _fusions(cells)]
    rest = ProfileRow(
        kind="unattributed", operator="unattributed", role="python, scheduler, sampling", phase="", dtype="", axes={},
        calls=sum(raw["forwards"].values()), time_ms=rest_s * 1e3, time_share=rest_s / total_s,
    )  # fmt: skip
    return Profile(
        rows=(*sorted(singles, key=_by_time), rest, *sorted(fused, key=_by_time)),
        aten=_aten(raw),
        wall_ms=raw["wall_s"] * 1e3,
        watched_wall_ms=wall_s * 1e3,
        watch_overhead_ms=raw["overhead_s"] * 1e3,
        attributed_share=attributed_s / total_s,
        unattributed_ms=rest_s * 1e3,
        forwards=raw["forwards"],
        threads=threads,
        dtype=raw["model"]["dtype"],
        eps=raw["model"]["eps"],
        compiled=raw["compiled"],
        overlaid=any(cell.kernel for cell in cells),
        notes=_notes(raw, target, threads),
    )


def cost_of(operator: str, axes: Mapping[str, int], dtype: str) -> tuple[float, float, float, str] | None:
    """(operations, bytes read, bytes written, dtype of the operations) of one call; None without a cost model.

    The fewest that any implementation must spend: inputs and weights read once, outputs written once.
    """
    cost = _COSTS.get(operator) or (OPERATORS[operator].cost if operator in OPERATORS else None)
    if cost is None:
        return None
    names = {**axes, "B": _BYTES[dtype]}
    flops, read, written = (
        float(eval(expression, {"__builtins__": {}}, names))  # our own expressions, no input
        for expression in (cost.flops, cost.bytes_read, cost.bytes_written)
    )
    return flops, read, written, dtype if cost.dtype == VALUE else cost.dtype


class _Roofline:
    """Makes rows: totals, shares and the time at the roofline."""

    def __init__(self, target: Target, threads: int, total_s: float) -> None:
        self.target, self.threads, self.total_s = target, threads, total_s

    def row(
        self, kind: Literal["single", "fused"], cell: _Cell, sites: tuple[str, ...], covers: tuple[str, ...]
    ) -> ProfileRow:
        from profiles.roofline import bound

        figures: dict[str, Any] = {}
        cost = cost_of(cell.operator, cell.axes, cell.dtype)
        if cost is not None:
            flops, read, written, computes = cost
            figures = {
                "flops": flops * cell.calls, "bytes_read": read * cell.calls, "bytes_written": written * cell.calls,
                "intensity": flops / (read + written),
            }  # fmt: skip
            # Ceilings of a busy machine were reached all the same: the gap is then at least this large.
            limit = bound(flops, read, written, computes, self.target, self.threads)
            figures |= {"bound": limit.bound, "roofline_ms": limit.time_s * cell.calls * 1e3}
            if limit.time_s > 0:
                figures["gap"] = cell.seconds / (limit.time_s * cell.calls)
        return ProfileRow(
            kind=kind, operator=cell.operator, role=cell.role, phase=cell.phase, dtype=cell.dtype, axes=cell.axes,
            calls=cell.calls, time_ms=cell.seconds * 1e3, time_share=cell.seconds / self.total_s, sites=sites,
            covers=covers, kernel=cell.kernel, **figures,
        )  # fmt: skip


def _cell(row: Mapping[str, Any]) -> _Cell:
    """A raw row in the words of `kernels.problems`."""
    operator, axes, site = row["operator"], dict(row["axes"]), row["site"]
    if row["mean_length"] is not None:
        axes["length"] = max(1, round(row["mean_length"]))
    if operator == "attention":
        operator = "attention_decode" if axes["queries"] == 1 else "attention_prefill"
        if operator == "attention_decode":
            del axes["queries"]
    elif operator == "mlp":
        inner = axes.pop("inner")
        if row["inner_calls"]:  # its projections are rows of their own: what is left is the gate
            operator, axes, site = "silu_mul", {"n": axes["m"] * inner}, f"{site}.act_fn"
        else:
            axes["inner"] = inner
    return _Cell(
        operator, row["role"], row["phase"], row["dtype"], axes, row["calls"], row["self_s"], site, row["kernel"]
    )


class _Fusion(NamedTuple):
    """Singles that one kernel could do, named by (operator, role); a role of None takes any."""

    operator: str
    parts: tuple[tuple[str, str | None], ...]
    phases: tuple[str, ...] = ("decode", "prefill")


_QKV = (("linear", "q"), ("linear", "k"), ("linear", "v"))
_GATE_UP = (("linear", "gate"), ("linear", "up"))
_MLP = (*_GATE_UP, ("silu_mul", None), ("linear", "down"))
_NORM_1, _NORM_2 = ("rmsnorm", "input_layernorm"), ("rmsnorm", "post_attention_layernorm")
_FUSIONS = (
    _Fusion("linear", _QKV),
    _Fusion("linear", _GATE_UP),
    _Fusion("rmsnorm_linear", (_NORM_1, *_QKV)),
    _Fusion("rmsnorm_linear", (_NORM_2, *_GATE_UP)),
    _Fusion("mlp", _MLP),
    _Fusion("rmsnorm_mlp", (_NORM_2, *_MLP)),
    _Fusion("rotary_attention", (("rotary", None), ("cache_update", None), ("attention_decode", None)), ("decode",)),
    _Fusion("lm_head_argmax", (("rmsnorm", "norm"), ("linear", "lm_head")), ("decode",)),
)


def _fusions(cells: Iterable[_Cell]) -> Iterable[tuple[_Cell, tuple[str, ...], tuple[str, ...]]]:
    """Fused cells with their sites and the operators they take in, wherever all parts are there at the same rows."""
    groups: dict[tuple[str, str, int], list[_Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.phase, cell.dtype, _rows_of(cell)].append(cell)
    # the gate's one axis counts elements: find it by the width of the projection before it
    gates = [cell for cell in cells if cell.operator == "silu_mul"]
    for (phase, dtype, rows), group in groups.items():
        if not rows:
            continue
        widths = {cell.axes["n"] for cell in group if cell.operator == "linear" and cell.role == "gate"}
        here = [*group, *(g for g in gates if g.phase == phase and g.dtype == dtype and g.axes["n"] / rows in widths)]
        for fusion in _FUSIONS:
            found = [[c for c in here if c.operator == operator and role in (None, c.role)]
                     for operator, role in fusion.parts]  # fmt: skip
            if phase in fusion.phases and all(found) and not any(c.kernel for cs in found for c in cs):
                yield _fuse(fusion, phase, dtype, rows, found)


def _rows_of(cell: _Cell) -> int:
    """Tokens that one call takes: what the parts of a fused operator must have in common."""
    axes = cell.axes
    tokens = axes.get("batch", 1) * axes.get("queries", axes.get("new", 1)) if "batch" in axes else 0
    return axes.get("m") or axes.get("rows") or tokens


def _fuse(
    fusion: _Fusion, phase: str, dtype: str, rows: int, found: list[list[_Cell]]
) -> tuple[_Cell, tuple[str, ...], tuple[str, ...]]:
    parts = [cell for cells in found for cell in cells]
    linears = [cell for cell in parts if cell.operator == "linear"]
    if fusion.operator in ("linear", "rmsnorm_linear", "lm_head_argmax"):
        axes = {"m": rows, "n": sum(c.axes["n"] for c in linears), "k": linears[0].axes["k"]}
    elif fusion.operator in ("mlp", "rmsnorm_mlp"):
        axes = {"m": rows, "hidden": linears[0].axes["k"], "inner": linears[0].axes["n"]}
    else:
        attention = found[-1]
        calls = sum(c.calls for c in attention)
        axes = {**attention[0].axes, "length": round(sum(c.axes["length"] * c.calls for c in attention) / calls)}
    calls = sum(c.calls for c in found[-1])
    roles = "+".join(dict.fromkeys(c.role for c in parts))
    cell = _Cell(fusion.operator, roles, phase, dtype, axes, calls, sum(c.seconds for c in parts), "", "")
    return cell, tuple(dict.fromkeys(c.site for c in parts)), tuple(dict.fromkeys(c.operator for c in parts))


def _aten(raw: Mapping[str, Any], most: int = 400) -> tuple[AtenRow, ...]:
    forwards = raw["traced_forwards"]
    rows = [
        AtenRow(
            operator=row["operator"], role=row["role"], phase=row["phase"], aten=row["aten"], shapes=row["shapes"],
            calls_per_forward=row["calls"] / forwards[row["phase"]],
            self_ms_per_forward=row["self_s"] * 1e3 / forwards[row["phase"]],
        )
        for row in raw["aten"]
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.self_ms_per_forward)[:most])


def _notes(raw: Mapping[str, Any], target: Target, threads: int) -> tuple[str, ...]:
    notes = []
    ratio = raw["watched_wall_s"] / raw["wall_s"]
    if abs(ratio - 1) > DISAGREEMENT:
        why = "compiled graphs were watched eagerly" if raw["compiled"] else "the machine was busy, or warm-up counted"
        notes.append(f"The watched round took {ratio:.2f}× the untouched one ({why}): shares hold, totals may not.")
    if target.noisy:
        notes.append(
            f"The ceilings of {target.name} were measured on a busy machine: gaps are at least as large as given."
        )
    if raw["threads"] != threads:
        notes.append(f"The engine computed with {raw['threads']} threads; the ceilings are for {threads}.")
    return tuple(notes)


def _by_time(row: ProfileRow) -> float:
    return -row.time_ms
