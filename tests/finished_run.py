"""A run's folder as the loop leaves it, with figures like those of a real run: two kernels won, one of them stayed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from kb.records import EndToEnd, Idea, IdeaEvent, Outcome, Provenance, ScoreParts, Trial
from kb.store import Store
from kernels.problems import build
from kernels.ruler import verdict as ruler
from kernels.ruler.spec import Problem
from kernels.templates import families
from profiles.accuracy import AccuracyVerdict, Check
from profiles.engines.base import OverlayCount, Promoted, Resolved, Settings, Stack
from profiles.load import load_workload
from profiles.operators import Profile, ProfileRow
from profiles.rounds import COLUMNS
from profiles.stats import RatioInterval
from profiles.target import Bandwidth, Flops, Target
from tasks.codec import to_json
from tasks.evaluate import Comparison, Pair
from tasks.promote import Decision
from tasks.run_state import RunState, create_run, write_json
from tasks.search import Confirmation, SearchResult

SECRET = {"m": 7919}
"""A hidden shape: nothing that a run writes for readers may hold this number."""
BY = Provenance(roofloop="0.1.0", ruler="r", engine="transformers 5", target="f", workload="w", target_family="cpu")
METRIC = "output_tokens_per_s"
VERSION = "transformers 5.24.0, torch 2.13.0+cpu"
STATIC = Settings(engine="transformers", knobs={"cache": "static"})


def clock(minute: int) -> str:
    return f"2026-12-01T10:{minute:02d}:00+00:00"


def product_of(ratios: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Product of independent ratios: the half-widths of their logarithms add in quadrature."""
    centre = sum(math.log(estimate) for estimate, _, _ in ratios)
    below = math.hypot(*(math.log(estimate / low) for estimate, low, _ in ratios))
    above = math.hypot(*(math.log(high / estimate) for estimate, _, high in ratios))
    return math.exp(centre), math.exp(centre - below), math.exp(centre + above)


def problem(operator: str) -> Problem:
    axes: dict[str, Any] = {"linear": {"n": 1536, "k": 576}, "rmsnorm": {"cols": 576}, "silu_mul": {}}[operator]
    visible = {"linear": [{"m": 8}], "rmsnorm": [{"rows": 8}], "silu_mul": [{"n": 12288}]}[operator]
    return replace(build(operator, visible=visible, **axes), hidden=(SECRET,))


def promoted(operator: str, verdict_id: str) -> Promoted:
    one, family = problem(operator), families(operator)[0]
    return Promoted(one, family.render(family.default, one), verdict_id, (dict(one.visible[0]),))


def profile(times: dict[tuple[str, str, str], tuple[float, float | None]], wall_ms: float) -> Profile:
    """Of `{(operator, role, phase): (ms, ms at the roofline)}`."""
    rows = []
    for (operator, role, phase), (ms, roofline) in times.items():
        flops, moved = (2e9 * ms / 100, 1e8 * ms) if roofline else (None, None)
        rows.append(
            ProfileRow(
                kind="unattributed" if operator == "unattributed" else "single", operator=operator, role=role,
                phase=phase, dtype="bfloat16", axes={}, calls=127, time_ms=ms, time_share=ms / wall_ms, flops=flops,
                bytes_read=moved, bytes_written=0.0 if moved else None, bound="memory" if roofline else "overhead",
                roofline_ms=roofline, gap=ms / roofline if roofline else None,
            )
        )  # fmt: skip
    known = sum(row.time_ms for row in rows if row.kind == "single")
    return Profile(
        rows=tuple(rows), wall_ms=wall_ms, watched_wall_ms=wall_ms, watch_overhead_ms=200.0,
        attributed_share=known / wall_ms, unattributed_ms=wall_ms - known, forwards={"prefill": 1, "decode": 127},
        threads=2, dtype="bfloat16", eps=1e-5, compiled=False, overlaid=False,
    )  # fmt: skip


BEFORE = profile(
    {
        ("linear", "gate", "decode"): (2600.0, 500.0),
        ("linear", "lm_head", "decode"): (744.0, 178.0),
        ("linear", "gate", "prefill"): (560.0, 460.0),
        ("attention_decode", "core", "decode"): (1083.0, 148.0),
        ("rmsnorm", "input_layernorm", "decode"): (374.0, 4.1),
        ("silu_mul", "mlp", "decode"): (206.0, 7.4),
        ("rotary", "qk", "decode"): (201.0, 2.8),
        ("attention_glue", "self_attn", "decode"): (216.0, None),
        ("unattributed", "python, scheduler, sampling", ""): (108.0, None),
    },
    6100.0,
)
AFTER = profile(
    {
        ("linear", "gate", "decode"): (930.0, 500.0),
        ("linear", "lm_head", "decode"): (290.0, 178.0),
        ("linear", "gate", "prefill"): (555.0, 460.0),
        ("attention_decode", "core", "decode"): (1075.0, 148.0),
        ("rmsnorm", "input_layernorm", "decode"): (371.0, 4.1),
        ("silu_mul", "mlp", "decode"): (204.0, 7.4),
        ("attention_glue", "self_attn", "decode"): (214.0, None),
        ("unattributed", "python, scheduler, sampling", ""): (104.0, None),
    },
    3950.0,
)


def resolved(cache: str) -> Resolved:
    config = {"threads": 2, "dtype": "bfloat16", "max_batch": 8, "cache": cache, "attention": "sdpa"}
    return Resolved(engine="transformers", version=VERSION, config=config)


def row(rate: float) -> dict[str, float | int | bool | None]:
    held: dict[str, float | int | bool | None] = dict.fromkeys(COLUMNS)
    held |= {"completed": 24, "failed": 0, "output_tokens_per_s": rate, "total_tokens_per_s": 2 * rate}
    for name, ms in (("ttft", 1e5 / rate), ("tpot", 7e3 / rate), ("itl", 7e3 / rate), ("e2el", 1e6 / rate)):
        held |= {f"{name}_ms_p50": ms, f"{name}_ms_p95": 1.08 * ms, f"{name}_ms_mean": 1.01 * ms}
    return held | {"peak_memory_bytes": 1_276_850_176}


def interval(ratio: float, width: float = 0.06, level: float = 0.95) -> RatioInterval:
    return RatioInterval(estimate=ratio, low=ratio * (1 - width), high=ratio * (1 + width), n=6, level=level)


def comparison(ratio: float, rate: float, *, counted: tuple[Promoted, ...] = (), **more: Any) -> Comparison:
    checks = (
        Check(name="engine_tokens", status="pass", value=2048, detail="2048 tokens scored."),
        Check(name="top1_share_drop", status="pass", value=0.0012, limit=0.0098, detectable=0.0057,
              detail="Top-1 agreement is 0.0012 worse than stock's (limit 0.0098); 0.0057 would have been seen."),
        Check(name="kl_increase_nats", status="pass", value=0.0001, limit=0.005, detectable=0.0004,
              detail="Mean KL divergence is 0.0001 worse than stock's (limit 0.005); 0.0004 would have been seen."),
    )  # fmt: skip
    given: dict[str, Any] = {
        "accuracy": AccuracyVerdict(
            status="pass", scored_tokens=2048, stock_tokens=2048, checks=checks,
            reason="Within all limits. A drop of 0.57 points in top-1 agreement would have been seen.",
        ),
        "counts": tuple(
            OverlayCount(problem=k.problem.name, candidate=k.candidate.id, sites=60, taken=7620, fell_back=60,
                         reasons={"shape": 60}, prepare_s=0.41, prepared_bytes=106_000_000) for k in counted
        ),
        "verdict": "above",
        "interval": interval(ratio),
    }  # fmt: skip
    pairs = tuple(
        Pair(hidden=i % 4 in (1, 2), order="AB", a=rate, b=rate * ratio * (1 + 0.01 * (i - 2)), ratio=ratio)
        for i in range(6)
    )
    return Comparison(
        metric=METRIC, a=resolved("DynamicCache"), b=resolved("static"), pairs=pairs, a_value=rate,
        b_value=rate * ratio, level=0.95, looks=2, threshold=1.01, a_row=row(rate),
        b_row=row(rate * ratio), a_spread=0.021, duration_s=80.0, a_peak_memory_bytes=1_276_850_176,
        b_peak_memory_bytes=1_395_864_371, raw_file="/somewhere/else/raw.json", **(given | more),
    )  # fmt: skip


def trial(number: int, knobs: dict[str, Any], value: float | None, status: str = "complete", **more: Any) -> Trial:
    return Trial(
        run_id="r", number=number, knobs=knobs, status=status, metric=METRIC, value=value, provenance=BY,
        resolved_hash=f"h{number}", at=clock(3), seconds=21.0, **more,
    )  # fmt: skip


SEARCH = SearchResult(
    best=STATIC, best_trial=1, reason="confirmed in interleaved rounds: 1.35× (1.27 to 1.43)", default_first=85.5,
    default_last=88.0, drift=0.029, excluded=(), crash_sets=(), stopped="all 6 trials are done", effects=(),
    trials=(
        trial(0, {}, 85.5, role="default"), trial(1, {"cache": "static"}, 115.4),
        trial(2, {"cache": "static", "prompt_lookup": 4}, None, "gate_failed", reason="accuracy: KL 0.021 nats"),
        trial(3, {"threads": 1}, 51.2), trial(4, {"max_batch": 64}, None, "out_of_memory", reason="9.1 GiB"),
        trial(5, {}, 88.0, role="default_again"),
    ),
    confirmations=(Confirmation(better=True, ratio=1.35, low=1.27, high=1.43, reason="in interleaved rounds"),),
)  # fmt: skip


class FinishedRun:
    """Builds the folder stage by stage; `until` stops after the stage of that name, as a kill would.

    `order` gives the ids of the two winners, in the order in which they are tested end to end; `final` is what the
    confirmation decides; `text` goes into every hypothesis; without
    `ideas` the memory stays empty, which is quicker.
    """

    def __init__(
        self, home: Path, until: str = "905-profile-after", *, order: tuple[str, str] = ("ccc", "aaa"),
        final: str = "promoted", final_ratio: float = 1.78, text: str = "", layer: str = "kernel", ideas: bool = True,
    ) -> None:  # fmt: skip
        self.store = Store(home / "kb")
        workload = load_workload("smollm2-cpu")
        self.run: RunState = create_run(
            home / "runs", workload, seed=3, fingerprint="f", versions={"roofloop": "0.1.0"}
        )
        self.folder, self._until, self._going, self._minute = self.run.folder, until, True, 0
        self.text, self._layer = text, layer
        linear = promoted("linear", "v-linear")
        one = Stack(STATIC, (linear,))
        self._before_the_rounds()
        if self._going and ideas:
            self._ideas()
        self._stage("110-profile", {"profile": BEFORE, "threads": 2})
        passed = {"i-free": "it takes the same place in the model as linear × template, which scores higher"}
        plan = {"campaigns": [*order, "bbb"], "ideas": [], "stop": None, "no_executor": [], "passed_over": passed}
        self._stage("120-plan", plan)
        if self._going:
            self._campaign(order[0], "i-linear", "linear", "won", 2.8)
            self._campaign(order[1], "i-norm", "rmsnorm", "won", 1.9)
            self._campaign("bbb", "i-silu", "silu_mul", "did_not_win", 0.97)
        self._stage("130-campaigns", {"campaigns": []})
        self._evaluate(order[0], comparison(1.31, 115.0, counted=(linear,)), one, True, "it is faster")
        lost = "Not decided after 6 pairs: 1.004× (0.981 to 1.027) does not lie above 1.010×"
        self._evaluate(
            order[1], comparison(1.004, 150.0, verdict=None, accuracy=None, interval=interval(1.004, 0.023)), one,
            False, lost,
        )  # fmt: skip
        found = comparison(final_ratio, 85.0, counted=(linear,))
        why = "it is faster, for sure" if final == "promoted" else "Accuracy fails: mean KL is 0.02 nats worse."
        self._stage(
            "900-final",
            {"end_to_end": self._row("final", final_ratio), "decision": Decision(decision=final, reason=why),
             "comparison": found, "stack": one, "stop_reason": "budget: 41 s are left"},
        )  # fmt: skip
        self._stage("905-profile-after", {"profile": AFTER, "threads": 2})
        write_json(self.folder / "clock.json", {"spent_s": 671.2})
        if until == "905-profile-after":
            self.run = self.run.with_status("finished", "budget: 41 s are left")

    def _stage(self, name: str, result: Any) -> None:
        if not self._going:
            return
        self._minute += 1
        at = clock(self._minute)
        title = name.split("-", 1)[1].split("-", maxsplit=1)[0].capitalize()
        self.run.finish(name, "k", title, to_json(result), started_at=at, seconds=41.5)
        self._going = name != self._until

    def _before_the_rounds(self) -> None:
        target = Target(
            name="cpu", kind="cpu", device="AMD EPYC 9B14", origin="measured", call_overhead_us=0.9,
            bandwidths=(
                Bandwidth(level="l2", working_set_bytes=2**20, capacity_bytes=2**21, threads=2, read_gbps=430.0),
                Bandwidth(level="dram", working_set_bytes=2**30, threads=2, read_gbps=41.0),
            ),
            flops=(Flops(dtype="bfloat16", threads=2, gflops=472.0), Flops(dtype="float32", threads=2, gflops=219.0)),
        )  # fmt: skip
        self._stage("010-target", {"target": target})
        self._stage("020-bringup", {"runs": True, "matches": True})
        base = {"resolved": resolved("DynamicCache"), "row": row(85.5), "value": 85.5, "rounds": 3}
        self._stage("030-baseline", base)
        self._stage("040-settings", SEARCH)

    def _ideas(self) -> None:
        run_id, n = self.run.run_id, 0
        rows = [
            ("i-linear", None, "linear", "promoted", 0.31, "kernel"),
            ("i-norm", None, "rmsnorm", "rejected", 0.05, "kernel"),
            ("i-silu", "i-linear", "silu_mul", "failed", 0.02, "kernel"),
            ("i-free", None, "linear", "open", 0.11, "kernel"),
            ("i-old", None, "rotary", "abandoned", 0.01, "framework"),
        ]  # fmt: skip
        for idea_id, parent, operator, status, gain, layer in rows:
            score = ScoreParts(p_success=0.6, gain=gain, urgency=1.0, accuracy_penalty=0.0, cost_minutes=1.0,
                               score=0.6 * gain, why="planned", at=clock(5))  # fmt: skip
            idea = Idea(
                id=idea_id, run_id=run_id, parent_id=parent, hypothesis=f"A tuned {operator} comes closer. {self.text}",
                layer=layer, lever=f"{operator} × template:{operator}_bf16 {self.text}".strip(), operator=operator,
                problem_name=f"{operator}_n1536_k576_bfloat16", approach="template", time_share=0.4, headroom=4.0,
                derivation="36.7 % of the time at 3.59× its roofline (memory): at most 26.5 % can go away",
                scores=(score,),
            )  # fmt: skip
            self.store.write(idea)
            if status != "open":
                n += 1
                why = "a failed relative says it cannot win" if status == "abandoned" else f"{status} in round 1"
                self.store.write(
                    IdeaEvent(run_id=run_id, idea_id=idea_id, number=1, status=status, reason=why, at=clock(6))
                )
        self.store.ingest()

    def _campaign(self, key: str, idea_id: str, operator: str, conclusion: str, ratio: float) -> None:
        home, kernel = self.folder / "campaigns" / key, promoted(operator, "")
        layer = self._layer if operator == "linear" else "kernel"
        idea = {"id": idea_id, "hypothesis": f"A tuned {operator} comes closer. {self.text}", "operator": operator,
                "lever": f"{operator} × template:{operator}_bf16", "layer": layer}  # fmt: skip
        task = {"campaign_id": key, "idea": idea, "problem": to_json(kernel.problem), "scope": "what it saw"}
        write_json(home / "campaign.json", {"run_id": self.run.run_id, "round": 1, "task": task})
        span = ruler.Interval(ratio, 0.95 * ratio, 1.05 * ratio, 40)
        said = ruler.Verdict(
            status="valid", mode="confirm", problem=kernel.problem.name, problem_id=kernel.problem.id,
            candidate_id=kernel.candidate.id, speedup=span, claim=0.96 * ratio, floor_fraction=0.62, faster=ratio > 1,
            cases={"visible": 4, "hidden": 6, "hidden_shapes": [SECRET]}, raw={"hidden": [SECRET]},
        )  # fmt: skip
        write_json(home / "verdicts" / f"{kernel.candidate.id}.confirm.json", said.to_json())
        tries = [
            {"status": "build_failed", "note": "error: 'x' was not declared"},
            {"status": "valid", "speedup": 0.9 * ratio, "low": 0.85 * ratio, "high": 0.95 * ratio, "claim": 2.0},
            {"status": "unresolved", "mode": "confirm", "speedup": ratio, "low": 0.0, "high": 1e9, "claim": 0.9 * ratio,
             "note": "the machine was busy"},
            {"status": "valid", "mode": "confirm", "speedup": ratio, "low": span.low, "high": span.high,
             "claim": said.claim},
        ]  # fmt: skip
        empty = {"mode": "screen", "speedup": None, "low": None, "high": None, "claim": None, "note": ""}
        for number, attempt in enumerate(tries, 1):
            parameters = {"columns": 16 * number, "schedule": "static"}
            fixed = {"campaign_id": key, "number": number, "parameters": parameters, "seconds": 9.0}
            write_json(home / "attempts" / f"{number:04d}.json", empty | fixed | attempt)
        outcome = Outcome(
            campaign_id=key, run_id=self.run.run_id, idea_id=idea_id, operator=operator, lever=idea["lever"],
            problem_name=kernel.problem.name, conclusion=conclusion, candidate_id=kernel.candidate.id,
            reason="it wins at 1 of 1 shapes" if conclusion == "won" else "best 0.97×, which is no win",
            verdict_id=said.id, speedup=ratio, low=span.low, high=span.high, attempts=4, seconds=58.0, provenance=BY,
            at=clock(8),
        )  # fmt: skip
        write_json(home / "outcome.json", to_json(outcome))

    def _evaluate(self, key: str, found: Comparison, stack: Stack, kept: bool, why: str) -> None:
        decision = Decision(decision="promoted" if kept else "rejected", reason=why)
        assert found.interval is not None
        self._stage(
            f"140-evaluate-{key}",
            {"end_to_end": self._row("promotion", found.interval.estimate), "decision": decision, "stack": stack,
             "promoted": kept, "comparison": found, "campaigns": [key]},
        )  # fmt: skip

    def _row(self, purpose: Any, ratio: float) -> EndToEnd:
        return EndToEnd(id="e", run_id=self.run.run_id, purpose=purpose, stack_id="s", metric=METRIC, ratio=ratio,
                        provenance=BY, at=clock(9))  # fmt: skip
