"""Traffic: figures against examples worked by hand, and a real child process on the other side."""

import json
import secrets
import time

import numpy as np
import pytest

from kernels.errors import InputError
from profiles import traffic
from profiles.engines.base import EngineFailure
from profiles.workload import Gates, TrafficSpec
from tests.scripted_engine import VOCABULARY, ScriptedEngine

FEW = TrafficSpec(concurrency=2, requests=4, input_tokens=6, output_tokens=5)


@pytest.fixture(scope="module")
def table_only(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    np.save(folder / "table.npy", np.log(np.random.default_rng(0).dirichlet(np.ones(VOCABULARY), VOCABULARY)))
    return folder


@pytest.fixture
def engine(tmp_path, table_only):
    opened = []

    def start(**script):
        opened.append(ScriptedEngine(tmp_path, table_only, **script))
        opened[-1].start()
        return opened[-1]

    yield start
    for each in opened:
        each.stop()


class Source:
    """Prompts out of random tokens; which are hidden can be told by the first."""

    def visible(self, seed, n, length):
        rng = np.random.default_rng(seed)
        return tuple((0, *map(int, rng.integers(1, VOCABULARY, count - 1))) for count in length)

    def hidden(self, secret, n, length):
        rng = np.random.default_rng(list(secret))
        return tuple((1, *map(int, rng.integers(1, VOCABULARY, count - 1))) for count in length)


def prompts(n=4, length=6):
    return [[i + 1] * length for i in range(n)]


def row(index, send, stamps, chunks=None, error=None, inputs=10):
    chunks = chunks or [1] * len(stamps)
    return traffic.RequestRow(
        index=index, input_tokens=inputs, max_tokens=sum(chunks), due_s=send, send_s=send, stamps_s=stamps,
        chunks=chunks, tokens=[3] * sum(chunks), error=error,
    )  # fmt: skip


def test_figures_by_hand():
    rows = [
        row(0, 0.0, [0.1, 0.2, 0.4]),  # TTFT 100, E2EL 400, TPOT (400-100)/2 = 150, ITL 100 200
        row(1, 0.1, [0.4, 0.5], chunks=[1, 4]),  # TTFT 300, E2EL 400, TPOT (400-300)/4 = 25, ITL 100
        row(2, 0.2, [0.25]),  # one token: TTFT 50, no TPOT, no ITL
        row(3, 0.2, [0.3], error="boom"),  # counts in nothing but `failed`
    ]
    found = traffic.summarise(rows, 0.5, Gates(ttft_p95_ms=200, tpot_p95_ms=160), 7)
    assert (found.completed, found.failed) == (3, 1)
    assert (found.input_tokens, found.output_tokens) == (30, 9)
    assert found.output_tokens_per_s == pytest.approx(18)
    assert found.total_tokens_per_s == pytest.approx(78)
    assert found.requests_per_s == pytest.approx(6)
    assert found.goodput_rps == pytest.approx(4)  # row 1 misses the TTFT limit
    assert found.ttft_ms.mean == pytest.approx(150)
    assert found.ttft_ms.p50 == pytest.approx(100)
    assert found.ttft_ms.p95 == pytest.approx(280)  # 100 + 0.9 * 200
    assert found.tpot_ms.mean == pytest.approx(87.5)
    assert found.tpot_ms.n == 2
    assert sorted(traffic.RequestRow.model_validate(rows[0]).itl_ms) == pytest.approx([100, 200])
    assert found.itl_ms.mean == pytest.approx(400 / 3)
    assert found.e2el_ms.mean == pytest.approx((400 + 400 + 50) / 3)
    assert traffic.metric_of(found, "tpot_ms") == found.tpot_ms.mean
    assert traffic.metric_of(found, "ttft_ms_p95") == found.ttft_ms.p95
    assert traffic.metric_of(found, "peak_memory_bytes") == 7


def test_nothing_completed_is_none_and_not_zero():
    found = traffic.summarise([row(0, 0.0, [], chunks=[1], error="out of memory")], 1.0, Gates())
    assert found.failed == 1
    for name in traffic.COLUMNS:
        if name.endswith(("per_s", "rps")) or "_ms_" in name:
            assert name == "max_send_lag_ms" or traffic.metric_of(found, name) is None, name


def test_pooled_rounds_take_percentiles_over_requests():
    def one(rows):
        return traffic.Round(
            seed=0, hidden=False, traffic=FEW, rows=rows, summary=traffic.summarise(rows, 1.0, Gates(), 5)
        )  # fmt: skip

    pooled = traffic.pool([one([row(0, 0.0, [0.1])]), one([row(0, 0.0, [0.3]), row(1, 0.0, [0.5])])])
    assert pooled.ttft_ms.p50 == pytest.approx(300)
    assert pooled.output_tokens_per_s == pytest.approx(1.5)
    assert pooled.peak_memory_bytes == 5


def test_closed_loop_keeps_the_concurrency_and_stamps_in_the_parent(engine):
    found = traffic.run_round(engine(token_s=0.004), FEW, prompts(), seed=1)
    assert found.ok
    assert [len(r.tokens) for r in found.rows] == [5] * 4
    events = sorted([(r.send_s, 1) for r in found.rows] + [(r.stamps_s[-1], -1) for r in found.rows])
    level = peak = 0
    for _, step in events:
        level += step
        peak = max(peak, level)
    assert peak == 2
    assert all(r.send_s < r.stamps_s[0] <= r.stamps_s[-1] <= found.summary.duration_s + 1 for r in found.rows)
    assert found.metric("output_tokens_per_s") == pytest.approx(20 / found.summary.duration_s)


def test_open_loop_arrives_by_poisson_and_survives_idle_gaps(engine):
    spec = TrafficSpec(mode="open", rate_rps=40, requests=12, input_tokens=6, output_tokens=2)
    found = traffic.run_round(engine(token_s=0.002), spec, prompts(12), seed=5)
    again = traffic._arrivals(spec, 5, 12)
    assert found.ok
    assert [r.due_s for r in found.rows] == again
    assert all(r.send_s >= r.due_s for r in found.rows)
    gaps = np.diff(traffic._arrivals(spec, 3, 4000))
    assert gaps.mean() == pytest.approx(1 / 40, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 40, rel=0.08)


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ({"short": 1}, "emitted 4 tokens where 5"),
        ({"long": 2}, "emitted 6 tokens where 5"),
        ({"fail_every": 1}, "scripted"),
    ],
)
def test_wrong_token_counts_and_errors_are_failures(engine, script, what):
    found = traffic.run_round(engine(token_s=0.001, **script), FEW, prompts(), seed=1)
    assert not found.ok
    assert found.summary.failed == 4
    assert any(what in error for error in found.errors), found.errors
    assert found.metric("output_tokens_per_s") is None
    assert found.metric("ttft_ms") is None


def test_one_failed_request_marks_the_round(engine):
    found = traffic.run_round(engine(token_s=0.001, fail_every=3), FEW, prompts(), seed=1)
    assert not found.ok
    assert found.summary.completed == 3
    assert found.summary.output_tokens == 15
    measured = traffic.measure(engine(token_s=0.001, fail_every=3), FEW, Source())
    assert measured.value is None
    assert "1 of 4 requests failed: scripted" in measured.note


def test_tokens_held_back_show_as_long_gaps(engine):
    long = FEW.model_copy(update={"output_tokens": 24})
    honest = traffic.run_round(engine(token_s=0.003), long, prompts(), seed=1)
    holding = traffic.run_round(engine(token_s=0.003, chunk=12), long, prompts(), seed=1)
    assert holding.rows[0].chunks == (12, 12)
    assert holding.metric("itl_ms") > 5 * honest.metric("itl_ms")
    assert holding.metric("ttft_ms") > 3 * honest.metric("ttft_ms")


def test_crash_and_hang_are_typed(engine):
    with pytest.raises(EngineFailure) as crash:
        traffic.run_round(engine(crash_after=6), FEW, prompts(), seed=1)
    assert crash.value.kind == "crash"
    hanging = engine(hang_after=6)
    with pytest.raises(EngineFailure) as hang:
        traffic.run_round(hanging, FEW, prompts(), seed=1, stall_s=0.3)
    assert hang.value.kind == "hang"
    spec = TrafficSpec(mode="open", rate_rps=30, requests=60, input_tokens=6, output_tokens=5)
    with pytest.raises(EngineFailure) as hang:
        traffic.run_round(engine(hang_after=6), spec, prompts(60), seed=1, stall_s=0.3)
    assert hang.value.kind == "hang"


def test_wire_ids_say_nothing():
    seen = []

    class Recorder:
        def submit(self, request):
            seen.append(request.id)

        def events(self, timeout_s):
            from profiles.engines.base import TokenEvent

            yield TokenEvent(seen[-1], (1, 2, 3, 4, 5), time.perf_counter(), True)
            yield TokenEvent("of another round", (1,), time.perf_counter(), True)

        def peak_memory_bytes(self):
            return 0

    one = FEW.model_copy(update={"concurrency": 1})
    found = traffic.run_round(Recorder(), one, prompts(), seed=1, hidden=True)
    assert found.ok
    assert found.summary.peak_memory_bytes is None
    assert len(set(seen)) == 4
    assert all(len(i) == 16 for i in seen)


def test_lengths_are_exact_or_spread_by_the_seed():
    assert traffic.lengths(FEW, 3) == ([6] * 4, [5] * 4)
    spread = TrafficSpec(requests=200, input_tokens=100, output_tokens=50, length_spread=0.2)
    inputs, outputs = traffic.lengths(spread, 3)
    assert traffic.lengths(spread, 3) == (inputs, outputs)
    assert min(inputs) >= 80
    assert max(inputs) <= 120
    assert len(set(inputs)) > 20
    assert 40 <= min(outputs) <= max(outputs) <= 60


def test_measure_throws_the_first_round_away_and_stops_when_stable(engine):
    kept = []
    found = traffic.measure(
        engine(token_s=0.004), FEW, Source(), max_rounds=4, tolerance=0.5, seed=2, progress=kept.append
    )  # fmt: skip
    assert found.stable
    assert len(found.rounds) == len(kept) == 2
    assert [r.seed for r in found.rounds] == [2001, 2002]
    assert found.value == pytest.approx(np.median([r.metric("output_tokens_per_s") for r in found.rounds]))
    unstable = traffic.measure(engine(token_s=0.002, noise=1.0), FEW, Source(), max_rounds=3, tolerance=0.0)
    assert not unstable.stable
    assert len(unstable.rounds) == 3
    assert "3 rounds" in unstable.note
    late = traffic.measure(engine(), FEW, Source(), max_rounds=9, tolerance=0.0, deadline=time.monotonic())
    assert len(late.rounds) == 2


def test_a_hopeless_first_round_is_all_that_is_measured(engine):
    seen, server = [], engine(token_s=0.002)

    def hopeless(value):
        seen.append(value)
        return True

    found = traffic.measure(server, FEW, Source(), warm_up_tokens=1, hopeless=hopeless)
    assert found.pruned
    assert not found.stable
    assert [found.value] == seen
    assert len(found.rounds) == 1
    assert len(found.rounds[0].rows[0].tokens) == FEW.output_tokens  # only the warm-up is short
    assert not traffic.measure(engine(), FEW, Source(), tolerance=9.0, hopeless=lambda value: False).pruned


def test_raw_file_keeps_rows_but_not_hidden_tokens(engine, tmp_path):
    server = engine(token_s=0.001)
    shown = traffic.run_round(server, FEW, traffic.draw_prompts(Source(), FEW, 1), seed=1)
    secret = secrets.token_bytes(16)
    drawn = traffic.draw_prompts(Source(), FEW, 1, secret)
    assert {p[0] for p in drawn} == {1}
    hidden = traffic.run_round(server, FEW, drawn, seed=1, hidden=True)
    traffic.write_raw(tmp_path / "deep" / "raw.json", [shown, hidden], {"engine": "scripted"})
    value = json.loads((tmp_path / "deep" / "raw.json").read_text())
    assert value["rounds"][0]["rows"][0]["tokens"] == list(shown.rows[0].tokens)
    assert value["rounds"][1]["rows"][0]["tokens"].startswith("sha256:")
    assert value["rounds"][1]["rows"][0]["stamps_s"] == list(hidden.rows[0].stamps_s)
    assert list(value["rows"][0]) == list(traffic.COLUMNS)
    assert value["columns"]["ttft_ms_p95"]["unit"] == "ms"
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["raw.json"]


def test_unknown_metric_is_bad_input():
    with pytest.raises(InputError, match="no metric 'speed'"):
        traffic.metric_of(traffic.summarise([], 1.0, Gates()), "speed")
