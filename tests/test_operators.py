"""The operator profile of a tiny random Llama: everything accounted for, nothing left behind, sums that add up."""

import copy
import json

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from kernels.errors import InputError
from kernels.overlay import install
from kernels.problems.operators import OPERATORS
from kernels.ruler.floor import cost
from profiles.engines.base import Promoted
from profiles.operators import InconsistentProfile, analyse, collect_in_child, cost_of
from profiles.operators_child import phase_of
from profiles.target import Bandwidth, Flops, Target
from tasks.profile import opportunities, problems

LAYERS, STEPS, BATCH, PROMPT, HIDDEN, INNER = 2, 12, 2, 6, 64, 96
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
TARGET = Target(
    name="paper", kind="cpu", device="paper", origin="datasheet",
    bandwidths=(Bandwidth(level="dram", working_set_bytes=1 << 30, threads=1, read_gbps=10, write_gbps=10),),
    flops=(Flops(dtype="bfloat16", threads=1, gflops=100), Flops(dtype="float32", threads=1, gflops=50)),
)  # fmt: skip


def tiny(config=None, kind=LlamaForCausalLM, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return kind(config or LlamaConfig(**SIZES)).to(dtype).eval()


def server(model, cache="dynamic"):
    @torch.no_grad()
    def run():
        x = torch.arange(BATCH * PROMPT).view(BATCH, PROMPT)
        past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=32)
        for _ in range(STEPS + 1):
            x = model(x, cache=past).logits[:, -1:].argmax(-1)

    return run


@pytest.fixture(scope="module")
def raw():
    torch.set_num_threads(1)
    model = tiny()
    run = server(model)
    run()
    return json.loads(json.dumps(collect_in_child(model, run)))


@pytest.fixture(scope="module")
def profile(raw):
    return analyse(raw, TARGET, 1)


def test_every_call_is_counted_where_it_belongs(profile):
    assert profile.forwards == {"prefill": 1, "decode": STEPS}
    calls = {(r.operator, r.role, r.phase): r.calls for r in profile.rows if r.kind == "single"}
    for role in ("q", "k", "v", "o", "gate", "up", "down"):
        assert calls["linear", role, "decode"] == LAYERS * STEPS
        assert calls["linear", role, "prefill"] == LAYERS
    assert calls["linear", "lm_head", "decode"] == STEPS
    for operator in ("rotary", "silu_mul", "cache_update", "attention_glue", "residual_add"):
        assert [n for (o, _, p), n in calls.items() if (o, p) == (operator, "decode")] == [LAYERS * STEPS], operator
    assert calls["attention_decode", "core", "decode"] == LAYERS * STEPS
    assert calls["attention_prefill", "core", "prefill"] == LAYERS
    assert calls["rmsnorm", "norm", "prefill"] == calls["embedding", "embed_tokens", "prefill"] == 1


def test_shares_add_up_and_fused_rows_are_their_parts(profile):
    singles = profile.singles()
    assert sum(r.time_share for r in singles) == pytest.approx(1)
    assert sum(r.time_ms for r in singles) == pytest.approx(profile.watched_wall_ms, rel=0.03)
    assert 0 < profile.attributed_share <= 1
    assert profile.unattributed_ms == next(r.time_ms for r in singles if r.kind == "unattributed")
    time = {(r.operator, r.role, r.phase): r.time_ms for r in singles}
    fused = {(r.operator, r.phase): r for r in profile.rows if r.kind == "fused"}
    linear = [time["linear", role, "decode"] for role in ("gate", "up", "down")]
    assert fused["mlp", "decode"].time_ms == pytest.approx(sum(linear) + time["silu_mul", "mlp", "decode"])
    assert fused["mlp", "decode"].covers == ("linear", "silu_mul")
    assert "model.layers.*.mlp.gate_proj" in fused["mlp", "decode"].sites
    head = fused["lm_head_argmax", "decode"]
    assert head.time_ms == pytest.approx(time["rmsnorm", "norm", "decode"] + time["linear", "lm_head", "decode"])
    rotary = fused["rotary_attention", "decode"]
    # lengths of the cache at decode: 7 … 18
    assert rotary.axes["length"] == round(sum(range(PROMPT + 1, PROMPT + STEPS + 1)) / STEPS)
    qkv = {(r.role, r.phase): r.axes for r in profile.rows if r.kind == "fused" and r.operator == "linear"}
    assert qkv["q+k+v", "decode"] == {"m": BATCH, "n": 128, "k": HIDDEN}
    assert qkv["gate+up", "prefill"] == {"m": BATCH * PROMPT, "n": 2 * INNER, "k": HIDDEN}


def test_roofline_by_hand(profile):
    (row,) = [r for r in profile.rows if (r.operator, r.role, r.phase) == ("linear", "gate", "decode")]
    calls = LAYERS * STEPS
    assert row.axes == {"m": BATCH, "n": INNER, "k": HIDDEN}
    assert row.flops == calls * 2 * BATCH * INNER * HIDDEN
    assert row.bytes_read == calls * 2 * (BATCH * HIDDEN + INNER * HIDDEN)
    assert row.bytes_written == calls * 2 * BATCH * INNER
    assert row.intensity == pytest.approx(row.flops / (row.bytes_read + row.bytes_written))
    assert row.bound == "memory"
    assert row.roofline_ms == pytest.approx((row.bytes_read + row.bytes_written) / 10e9 * 1e3)
    assert row.gap == pytest.approx(row.time_ms / row.roofline_ms)
    # a fused operator's floor is below that of its parts together
    parts = [r for r in profile.rows if r.kind == "single" and r.phase == "decode" and r.role in ("gate", "up", "down")]
    gate = [r for r in profile.rows if r.operator == "silu_mul" and r.phase == "decode"]
    (mlp,) = [r for r in profile.rows if r.operator == "mlp" and r.phase == "decode"]
    assert mlp.roofline_ms < sum(r.roofline_ms for r in parts + gate)
    assert all(r.roofline_ms is None for r in profile.rows if r.operator.endswith("_glue"))


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_costs_agree_with_counting_pairs(queries):
    axes = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": queries, "length": 9, "dim": 16}
    flops, read, written, _ = cost_of("attention_prefill", axes, "bfloat16")
    pairs = sum(1 for q in range(queries) for k in range(9) if k <= 9 - queries + q)
    assert flops == 2 * 4 * pairs * 4 * 16
    assert read == 2 * 2 * 16 * (4 * queries + 2 * 2 * 9)
    assert written == 2 * 2 * 4 * queries * 16
    if queries == 1:
        assert (flops, read) == cost_of("attention_decode", axes, "bfloat16")[:2]


def test_torch_operators_inside_each_site(profile):
    inside = {(r.operator, r.role, r.phase, r.aten): r for r in profile.aten}
    row = inside["linear", "lm_head", "decode", "aten::linear"]
    assert row.calls_per_forward == 1
    assert f"[{BATCH}, 1, {HIDDEN}]" in row.shapes
    assert inside["rmsnorm", "input_layernorm", "decode", "aten::rsqrt"].calls_per_forward == LAYERS


def test_the_model_is_left_as_it_was():
    model = tiny()
    run = server(model)
    before = [dict(vars(m)) for m in model.modules()]
    library = (Cache.update, dict(ALL_ATTENTION_FUNCTIONS._global_mapping), modeling_llama.apply_rotary_pos_emb)

    def failing():
        run()
        failing.calls += 1
        if failing.calls == 2:
            raise KeyboardInterrupt

    failing.calls = 0
    with pytest.raises(KeyboardInterrupt):
        collect_in_child(model, failing)
    after = (Cache.update, dict(ALL_ATTENTION_FUNCTIONS._global_mapping), modeling_llama.apply_rotary_pos_emb)
    assert after == library
    assert [dict(vars(m)) for m in model.modules()] == before


def test_the_stopwatch_takes_its_own_time_out(raw):
    assert raw["overhead_s"] > 0
    assert all(0 <= r["self_s"] <= r["total_s"] for r in raw["rows"])
    glue = [r for r in raw["rows"] if r["operator"] == "head_glue" and r["phase"] == "decode"]
    inner = sum(r["self_s"] for r in raw["rows"] if r["phase"] == "decode")
    assert inner <= glue[0]["total_s"]


def test_qwen_and_a_static_cache():
    model = tiny(Qwen2Config(**SIZES), Qwen2ForCausalLM, torch.float32)
    profile = analyse(collect_in_child(model, server(model, "static")), TARGET, 1)
    found = {(r.operator, r.role): r for r in profile.rows if r.phase == "decode"}
    assert found["linear", "q"].calls == LAYERS * STEPS
    assert found["attention_decode", "core"].axes["length"] == 32
    assert found["mlp", "gate+up+mlp+down"].kind == "fused"


def test_with_an_overlay_the_site_is_marked(tmp_path):
    from kernels.problems import build
    from kernels.ruler.spec import Candidate

    model = tiny(dtype=torch.float32)
    problem = build("mlp", dtype="float32", visible=[{"m": 2}, {"m": 12}], seed=1, hidden=HIDDEN, inner=INNER)
    source = (
        "import torch.nn.functional as F\n"
        "def run(x, g, u, d):\n"
        "    return F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)\n"
    )
    handle = install(model, [Promoted(problem, Candidate("torch", source, "run"), "v")], tmp_path, threads=1)
    profile = analyse(collect_in_child(model, server(model)), TARGET, 1)
    assert handle.counts()[0]["taken"] == 3 * LAYERS * (STEPS + 1)
    (row,) = [r for r in profile.rows if r.operator == "mlp" and r.phase == "decode"]
    assert (row.kind, bool(row.kernel), row.axes) == ("single", True, {"m": BATCH, "hidden": HIDDEN, "inner": INNER})
    assert profile.overlaid
    assert not [r for r in profile.rows if r.operator == "silu_mul"]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_with_an_overlay_is_marked(implementation, tmp_path):
    from kernels.problems import build
    from kernels.ruler.spec import Candidate

    model = tiny(LlamaConfig(**SIZES, attn_implementation=implementation))
    shapes = [{"batch": BATCH, "length": n} for n in (PROMPT + 1, PROMPT + STEPS)]
    problem = build("attention_decode", visible=shapes, seed=1, heads=4, kv_heads=2, dim=16)
    promoted = Promoted(problem, Candidate("torch", problem.reference, "run"), "v")
    handle = install(model, [promoted], tmp_path, threads=1)
    profile = analyse(collect_in_child(model, server(model)), TARGET, 1)
    handle.remove()
    rows = {r.phase: r for r in profile.rows if r.operator.startswith("attention_") and r.role == "core"}
    assert rows["decode"].kernel == rows["prefill"].kernel == problem.name
    assert rows["decode"].calls == LAYERS * STEPS
    assert handle.counts()[0]["taken"] == 3 * LAYERS * STEPS
    assert profile.overlaid


def test_what_contradicts_itself_is_refused(raw):
    twice = copy.deepcopy(raw)
    for row in twice["rows"]:
        row["self_s"] *= 2
    with pytest.raises(InconsistentProfile, match="of a round that took"):
        analyse(twice, TARGET, 1)
    with pytest.raises(InconsistentProfile, match="version 0"):
        analyse({**raw, "schema_version": 0}, TARGET, 1)
    slow = analyse({**raw, "wall_s": raw["watched_wall_s"] / 2}, TARGET, 2)
    assert "2.00×" in slow.notes[0]
    assert "1 threads" in slow.notes[1]
    noisy = analyse(raw, TARGET.model_copy(update={"noisy": True}), 1)
    assert [r.gap for r in noisy.rows] == [r.gap for r in analyse(raw, TARGET, 1).rows]  # a lower bound, and said so
    assert "busy" in noisy.notes[-1]


def test_a_model_elsewhere_is_refused():
    with pytest.raises(InputError, match="not on the CPU"):
        collect_in_child(tiny().to("meta"), lambda: None)


def test_phases():
    assert phase_of((), {"input_ids": torch.zeros(8, 1)}) == "decode"
    assert phase_of((torch.zeros(8, 2),), {}) == "prefill"
    packed = torch.zeros(1, 8)
    assert phase_of((), {"input_ids": packed, "max_seqlen_q": 1}) == "decode"
    assert phase_of((), {"input_ids": packed, "max_seqlen_q": {"full": 3}}) == "prefill"


def test_problems_group_shapes_and_places(profile):
    found = {problem.name: (problem, row) for problem, row in problems(profile, seed=1)}
    problem, row = found[f"linear_n{INNER}_k{HIDDEN}_bfloat16"]
    assert {shape["m"] for shape in problem.visible} == {BATCH, BATCH * PROMPT}
    assert problem.visible[0] == {"m": BATCH}  # most of the time goes to decode
    assert row.role == "gate+up"
    assert row.phase == "decode+prefill"
    assert row.calls == 2 * LAYERS * (STEPS + 1)
    rows = [r for r in profile.rows if r.operator == "linear" and r.kind == "single" and r.role in ("gate", "up")]
    assert row.time_ms == pytest.approx(sum(r.time_ms for r in rows))
    assert row.flops == sum(r.flops for r in rows)
    assert found[f"rmsnorm_cols{HIDDEN}_bfloat16"][0].scalars["eps"] == profile.eps == 1e-6
    times = [row.time_ms for _, row in problems(profile, seed=1)]
    assert times == sorted(times, reverse=True)
    assert [p.id for p, _ in problems(profile, seed=1)] == [p.id for p, _ in problems(profile, seed=2)]
    for problem, row in found.values():
        if problem.operator == "attention_decode":
            continue  # a profile counts the whole cache, the ruler what it draws
        flops, read, written = cost(problem, problem.visible[0])
        assert cost_of(problem.operator, row.axes, row.dtype)[:3] == (flops, read, written), problem.name


def test_opportunities_and_what_nothing_works_on(profile):
    found = opportunities(profile, seed=1)
    assert found.opportunities
    for offer in found.opportunities:
        assert offer.families
        assert offer.headroom >= 1
        assert offer.problem.operator in OPERATORS
        assert 0 < offer.time_share < 1
    lacking = {row.operator for row in found.no_executor}
    assert {"model_glue", "cache_update", "attention_prefill"} <= lacking
    attention = next(offer for offer in found.opportunities if offer.problem.operator == "attention_decode")
    assert attention.families == ("attention_decode_bf16",)
    assert attention.problem.axes == {"batch": None, "heads": 4, "kv_heads": 2, "length": None, "dim": 16}
    assert attention.shape["batch"] == BATCH
    assert not lacking & {offer.problem.operator for offer in found.opportunities}
