"""Which layer gave how much: one ratio per layer from the comparisons of a run, and whether they explain the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tasks.report_schema import CampaignRow, Interval, LayerGain

Layer = Literal["framework", "kernel"]


def interval(value: Mapping[str, Any] | None) -> Interval | None:
    """An interval out of a comparison's JSON."""
    if not value:
        return None
    return Interval(
        estimate=value["estimate"],
        low=value["low"],
        high=value["high"],
        n=value.get("n") or 0,
        level=value.get("level") or 0.95,
    )


def product(ratios: Sequence[Interval]) -> Interval | None:
    """Product of independent ratios: logs add, half-widths of the logs add in quadrature; None of none.

    `n` and `level` are the least of any. An end at or below 0 leaves the product without a lower end: 0.
    """
    if not ratios:
        return None
    centre = sum(math.log(ratio.estimate) for ratio in ratios)
    above = math.hypot(*(math.log(ratio.high / ratio.estimate) for ratio in ratios))
    low = 0.0
    if all(ratio.low > 0 for ratio in ratios):
        low = math.exp(centre - math.hypot(*(math.log(ratio.estimate / ratio.low) for ratio in ratios)))
    return Interval(
        estimate=math.exp(centre),
        low=low,
        high=math.exp(centre + above),
        n=min(ratio.n for ratio in ratios),
        level=min(ratio.level for ratio in ratios),
    )


def by_layer(
    search: Mapping[str, Any] | None,
    evaluations: Sequence[Mapping[str, Any]],
    campaigns: Sequence[CampaignRow],
    whole: Interval | None,
    *,
    ended: bool,
) -> tuple[LayerGain, ...]:
    """One gain per layer; `how` says from which comparisons, and whether their product agrees with the headline.

    Args:
        search: the settings search's result, None before it has ended.
        evaluations: results of the end-to-end stages in the order of time.
        campaigns: those of the run; their layers are those of their ideas.
        whole: the headline.
        ended: whether there will be no further promotion.
    """
    layers = {campaign.campaign_id: campaign.layer for campaign in campaigns}
    gains = [_settings(search)]
    for layer in ("framework", "kernel"):
        won = [e for e in evaluations if e["promoted"] and _layer(e, layers) == layer]
        gains.append(_promoted(layer, won, ended))
    known = [gain.ratio for gain in gains if gain.ratio]
    expected = product(known)
    if whole and expected and (whole.high < expected.low or whole.low > expected.high):
        last = max(index for index, gain in enumerate(gains) if gain.ratio)
        gap = (
            f"; all layers together would make {expected.estimate:.2f}× [{expected.low:.2f}, {expected.high:.2f}], "
            f"which the confirmation ({whole.estimate:.2f}×) does not bear out"
        )
        gains[last] = gains[last].model_copy(update={"how": gains[last].how + gap})
    return tuple(gains)


def _settings(search: Mapping[str, Any] | None) -> LayerGain:
    if search is None:
        return LayerGain(layer="settings", ratio=None, how="the settings search has not ended")
    won = next((c for c in search["confirmations"] if c["better"]), None)
    if won is None:
        return LayerGain(layer="settings", ratio=None, how=search["reason"])
    ratio = Interval(estimate=won["ratio"], low=won["low"], high=won["high"])
    return LayerGain(layer="settings", ratio=ratio, how="the best settings against the defaults, in interleaved rounds")


def _promoted(layer: Layer, won: Sequence[Mapping[str, Any]], ended: bool) -> LayerGain:
    ratios = [found for e in won if (found := interval(e["comparison"]["interval"]))]
    if not ratios:
        how = f"no idea of this layer was promoted{'' if ended else ' so far'}"
        return LayerGain(layer=layer, ratio=None, how=how)
    how = "one comparison: the stack with it against the stack without it, in interleaved rounds"
    if len(ratios) > 1:
        how = (
            f"product of {len(ratios)} comparisons, each the stack with one more against the stack without it; "
            "their intervals combined on the log scale, as of independent ratios"
        )
    return LayerGain(layer=layer, ratio=product(ratios), how=how)


def _layer(evaluation: Mapping[str, Any], layers: Mapping[str, str]) -> Layer:
    """The layer of what was tested; kernels that were tested together with something else count as kernels."""
    tested = {layers.get(key, "kernel") for key in evaluation["campaigns"]}
    return "framework" if tested == {"framework"} else "kernel"
