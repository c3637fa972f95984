"""The overlay on a tiny random Llama: real C++ candidates, real fall-backs, and a way back that leaves no trace."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from kernels.errors import InputError
from kernels.overlay import install
from kernels.problems import build
from kernels.ruler.build import build as compile_candidate
from kernels.ruler.spec import Candidate

HIDDEN, INNER, HEADS, KV, VOCAB = 64, 96, 4, 2, 97
SHAPES = [{"m": 2}, {"m": 12}]
FLOATS = """
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef BF16
using T = uint16_t;
static float get(T v) { uint32_t b = uint32_t(v) << 16; float f; std::memcpy(&f, &b, 4); return f; }
static T put(float f) {
    uint32_t b; std::memcpy(&b, &f, 4);
    if (f != f) return 0x7fc0;
    return T((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
#else
using T = float;
static float get(T v) { return v; }
static T put(float f) { return f; }
#endif
static float dot(const T* a, const T* b, int64_t k) {
    float s = 0; for (int64_t i = 0; i < k; ++i) s += get(a[i]) * get(b[i]); return s;
}
"""
RMSNORM = """
static void norm(const T* x, const T* w, float eps, T* y, int64_t cols) {
    float s = 0; for (int64_t c = 0; c < cols; ++c) s += get(x[c]) * get(x[c]);
    const float r = 1.0f / std::sqrt(s / cols + eps);
    for (int64_t c = 0; c < cols; ++c) y[c] = put(get(w[c]) * get(put(get(x[c]) * r)));
}
"""
SOURCES = {
    "rmsnorm": RMSNORM
    + """extern "C" void run_rmsnorm(const T* x, const T* w, float eps, T* y, int64_t rows, int64_t cols) {
    #pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) norm(x + r * cols, w, eps, y + r * cols, cols);
}""",
    "linear": """extern "C" void run_linear(const T* x, const T* w, T* y, int64_t m, int64_t n, int64_t k) {
    for (int64_t i = 0; i < m; ++i) for (int64_t j = 0; j < n; ++j) y[i * n + j] = put(dot(x + i * k, w + j * k, k));
}""",
    "linear_packed": """extern "C" int64_t prepare_linear_bytes(int64_t, int64_t n, int64_t k) { return n * k * 4; }
extern "C" void prepare_linear(const T* w, void* packed, int64_t, int64_t n, int64_t k) {
    for (int64_t j = 0; j < n; ++j) for (int64_t i = 0; i < k; ++i) ((float*)packed)[i * n + j] = get(w[j * k + i]);
}
extern "C" void run_linear(const T* x, const void* packed, T* y, int64_t m, int64_t n, int64_t k) {
    for (int64_t i = 0; i < m; ++i) for (int64_t j = 0; j < n; ++j) {
        float s = 0; for (int64_t l = 0; l < k; ++l) s += get(x[i * k + l]) * ((const float*)packed)[l * n + j];
        y[i * n + j] = put(s);
    }
}""",
    "silu_mul": """extern "C" void run_silu_mul(const T* x, const T* y, T* o, int64_t n) {
    for (int64_t i = 0; i < n; ++i) o[i] = put(get(put(get(x[i]) / (1 + std::exp(-get(x[i]))))) * get(y[i]));
}""",
    "mlp": """#include <vector>
extern "C" void run_mlp(const T* x, const T* g, const T* u, const T* d, T* y, int64_t m, int64_t h, int64_t n) {
    std::vector<T> a(n);
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            const float z = dot(x + i * h, g + j * h, h);
            a[j] = put(z / (1 + std::exp(-z)) * dot(x + i * h, u + j * h, h));
        }
        for (int64_t j = 0; j < h; ++j) y[i * h + j] = put(dot(a.data(), d + j * n, n));
    }
}""",
    "rmsnorm_linear": RMSNORM
    + """#include <vector>
extern "C" void run_rmsnorm_linear(
    const T* x, const T* g, const T* w, float eps, T* y, int64_t m, int64_t n, int64_t k) {
    std::vector<T> a(k);
    for (int64_t i = 0; i < m; ++i) {
        norm(x + i * k, g, eps, a.data(), k);
        for (int64_t j = 0; j < n; ++j) y[i * n + j] = put(dot(a.data(), w + j * k, k));
    }
}""",
}


@dataclass(frozen=True)
class Item:
    problem: object
    candidate: Candidate
    judged: tuple = ()


def cpp(name: str, dtype: torch.dtype, operator: str) -> Candidate:
    define = "#define BF16\n" if dtype == torch.bfloat16 else ""
    return Candidate("cpp", define + FLOATS + SOURCES[name], f"run_{operator}", prepares=name.endswith("_packed"))


def item(operator: str, dtype: torch.dtype, builds: Path, source: str | None = None, **axes: int) -> Item:
    name = str(dtype).removeprefix("torch.")
    visible = {"rmsnorm": [{"rows": 2}, {"rows": 12}], "silu_mul": [{"n": 2 * INNER}, {"n": 12 * INNER}]}
    problem = build(operator, dtype=name, visible=visible.get(operator, SHAPES), seed=1, **axes)
    # hidden shapes widen the judged range; here it is exactly 2…12 rows
    problem = replace(problem, hidden=())
    candidate = cpp(source or operator, dtype, operator)
    compile_candidate(candidate, problem, builds)
    return Item(problem, candidate)


def python(source: str, judged: tuple = ()) -> Item:
    problem = build("rmsnorm", dtype="float32", visible=[{"rows": 2}, {"rows": 12}], seed=1, cols=HIDDEN)
    return Item(replace(problem, hidden=()), Candidate("torch", source, "run"), judged)


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("builds")


def tiny(dtype: torch.dtype = torch.float32, **changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV, vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=True, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


TOKENS = torch.arange(12).view(2, 6) * 7 % VOCAB


@torch.no_grad()
def serve(model: LlamaForCausalLM, cache: str = "dynamic", steps: int = 3) -> torch.Tensor:
    """Prefill of 2 × 6 tokens and some decode steps; the logits of all of them."""
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=16)
    logits = [model(TOKENS, cache=past).logits]
    for step in range(steps):
        logits.append(model(TOKENS[:, step : step + 1], cache=past).logits)
    return torch.cat(logits, dim=1)


def everything(dtype: torch.dtype, builds: Path) -> list[Item]:
    qkv = HIDDEN + 2 * KV * HIDDEN // HEADS
    return [
        item("rmsnorm_linear", dtype, builds, n=qkv, k=HIDDEN),
        item("rmsnorm", dtype, builds, cols=HIDDEN),
        item("linear", dtype, builds, "linear_packed", n=HIDDEN, k=HIDDEN),
        item("linear", dtype, builds, n=VOCAB, k=HIDDEN),
        item("mlp", dtype, builds, hidden=HIDDEN, inner=INNER),
    ]


def state(model) -> dict:
    return {name: (dict(m.__dict__), m.forward) for name, m in model.named_modules()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_operator_agrees_with_stock_and_comes_off_again(dtype, cache, builds):
    model, tolerance = tiny(dtype), 1e-4 if dtype == torch.float32 else 0.05
    before, expected = state(model), serve(model, cache)
    handle = install(model, everything(dtype, builds), builds, threads=1)
    torch.testing.assert_close(serve(model, cache), expected, atol=tolerance, rtol=tolerance)
    counts = {c["problem"].split("_bf")[0].split("_fl")[0]: c for c in handle.counts()}
    assert [c["sites"] for c in counts.values()] == [2, 5, 4, 1, 2]
    # 4 forwards × 2 layers; the first norm of each layer is inside the fused call
    assert [c["taken"] for c in counts.values()] == [8, 12, 8, 4, 8]
    assert all(c["fell_back"] == 0 and not c["reasons"] for c in counts.values())
    packed = counts[f"linear_n{HIDDEN}_k{HIDDEN}"]
    assert 4 * HIDDEN * HIDDEN * 4 <= packed["prepared_bytes"] <= 4 * (HIDDEN * HIDDEN * 4 + 256)
    assert packed["prepare_s"] > 0
    handle.reset()
    assert all(c["taken"] == 0 for c in handle.counts())
    handle.remove()
    handle.remove()
    assert state(model) == before
    assert torch.equal(serve(model, cache), expected)


def norm(model):
    return model.model.layers[0].input_layernorm


def only(model, promoted, builds):
    handle = install(model, [promoted], builds, threads=1)
    return handle, lambda: handle.counts()[0]


def test_what_was_not_judged_takes_the_stock_path_and_says_why(builds):
    model = tiny()
    stock = norm(model).forward
    handle, count = only(model, item("rmsnorm", torch.float32, builds, cols=HIDDEN), builds)
    good = torch.randn(3, 4, HIDDEN)
    cases = {
        "shape": torch.randn(13, HIDDEN),
        "empty": torch.randn(0, 4, HIDDEN),
        "dtype": good.double(),
        "device": torch.empty(3, HIDDEN, device="meta"),
        "grad": good.clone().requires_grad_(),
    }
    for reason, x in cases.items():
        handle.reset()
        if reason == "device":
            with pytest.raises(RuntimeError, match="device meta"):
                norm(model)(x)  # as the stock model does
        else:
            torch.testing.assert_close(norm(model)(x), stock(x), atol=0, rtol=0)
        assert (count()["taken"], count()["reasons"]) == (0, {reason: 1}), reason
    handle.reset()
    with torch.no_grad():
        wide = torch.randn(4, HIDDEN, 3)
        odd = torch.randn(4 * HIDDEN + 1)[1:].view(4, HIDDEN)
        for x in (good, wide.mT.reshape(12, HIDDEN), wide.transpose(1, 2), odd, good[:, :1], good.transpose(0, 1)):
            torch.testing.assert_close(norm(model)(x), stock(x))
    assert (count()["taken"], count()["fell_back"]) == (6, 0)


def test_only_the_judged_shapes_when_they_are_listed(builds):
    model = tiny()
    _, count = only(model, replace(item("rmsnorm", torch.float32, builds, cols=HIDDEN), judged=({"rows": 4},)), builds)
    with torch.no_grad():
        norm(model)(torch.randn(4, HIDDEN))
        norm(model)(torch.randn(5, HIDDEN))
    assert (count()["taken"], count()["reasons"]) == (1, {"shape": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_go_through_as_in_the_stock_model(value, builds):
    model = tiny()
    x = torch.randn(2, 2, HIDDEN)
    x[0, 1, 5] = value
    with torch.no_grad():
        expected = model.model.layers[0].mlp(norm(model)(x))
        install(model, everything(torch.float32, builds)[1:], builds, threads=1)
        torch.testing.assert_close(model.model.layers[0].mlp(norm(model)(x)), expected, equal_nan=True)
    assert expected.isnan().any()
    assert expected[1].isfinite().all()


@pytest.mark.parametrize("change", ["in place", "data", "replaced"])
def test_weights_that_change_after_packing_are_noticed(change, builds):
    model = tiny()
    _, count = only(model, item("linear", torch.float32, builds, "linear_packed", n=HIDDEN, k=HIDDEN), builds)
    q, x = model.model.layers[0].self_attn.q_proj, torch.randn(2, HIDDEN)
    with torch.no_grad():
        q(x)
        if change == "in place":
            q.weight.mul_(2)
        elif change == "data":
            q.weight.data = q.weight.data * 2
        else:
            q.weight = torch.nn.Parameter(q.weight * 2)
        torch.testing.assert_close(q(x), torch.nn.functional.linear(x, q.weight))
    assert (count()["taken"], count()["reasons"]) == (1, {"weights": 1})


NORM = "import torch\ndef run(x, w, eps):\n    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))\n"
BAD = {
    "raises at the probe": (
        "def run(x, w, eps):\n    raise ValueError('no such path')\n",
        "disabled: ValueError: no such path",
    ),
    "does not load": ("import no_such_module\n", "disabled: ModuleNotFoundError: No module named 'no_such_module'"),
    "wrong result": ("def run(x, w, eps):\n    return x * 3\n", "disabled: probe: differs from the stock path"),
    "wrong shape": ("def run(x, w, eps):\n    return x[:, :1]\n", "disabled: RuntimeError: shape"),
    "wrong dtype": ("def run(x, w, eps):\n    return x.double()\n", "disabled: probe: torch.float64"),
    "nan": ("def run(x, w, eps):\n    return x * float('nan')\n", "disabled: probe: differs"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_candidate_stays_out_and_the_model_as_it_was(case, builds):
    model = tiny()
    before, expected = state(model), serve(model)
    source, reason = BAD[case]
    handle, count = only(model, python(source), builds)
    assert state(model) == before
    assert torch.equal(serve(model), expected)
    assert count()["sites"] == 0
    (given,) = count()["reasons"]
    assert given.startswith(reason), given
    handle.reset()
    assert list(count()["reasons"]) == [given]


def test_a_candidate_that_raises_later_gives_way_to_the_stock_path(builds):
    model = tiny()
    x = torch.randn(5, HIDDEN)
    with torch.no_grad():
        expected = norm(model)(x)
        _, count = only(model, python(NORM.replace("    return", "    assert len(x) < 5\n    return")), builds)
        assert torch.equal(norm(model)(x), expected)
        norm(model)(x[:2])
    assert (count()["taken"], count()["reasons"]) == (0, {"error: AssertionError": 2})


def test_operators_and_weights_without_a_site_are_named(builds):
    attention = build("softmax", dtype="float32", visible=[{"rows": 2, "cols": 3}], seed=1)
    other = build("rmsnorm", dtype="float32", visible=[{"rows": 2}], seed=1, cols=HIDDEN + 1)
    half = build("rmsnorm", dtype="bfloat16", visible=[{"rows": 2}], seed=1, cols=HIDDEN)
    candidate = Candidate("torch", NORM, "run")
    handle = install(tiny(), [Item(p, candidate) for p in (attention, other, half)], builds, threads=1)
    reasons = [next(iter(c["reasons"])) for c in handle.counts()]
    assert reasons[0] == "disabled: no site for operator softmax"
    assert reasons[1] == reasons[2] == "disabled: no module of the model has these weights"


def test_a_second_overlay_is_refused_and_threads_come_back(builds):
    model, before = tiny(), torch.get_num_threads()
    promoted = [python(NORM)]
    handle = install(model, promoted, builds, threads=before + 1)
    assert torch.get_num_threads() == before + 1
    with pytest.raises(InputError, match="already has an overlay"):
        install(model, promoted, builds, threads=1)
    handle.remove()
    assert torch.get_num_threads() == before
    install(model, promoted, builds, threads=before).remove()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_coarse_operators_fall_back_to_fine_ones_in_any_order(order, builds):
    model = tiny()
    expected = serve(model)
    pair = [
        item("silu_mul", torch.float32, builds),
        replace(item("mlp", torch.float32, builds, hidden=HIDDEN, inner=INNER), judged=({"m": 2},)),
    ]
    handle = install(model, [pair[i] for i in order], builds, threads=1)
    torch.testing.assert_close(serve(model), expected, atol=1e-4, rtol=1e-4)
    counts = {c["problem"].split("_")[0]: c for c in handle.counts()}
    assert (counts["silu"]["taken"], counts["mlp"]["taken"], counts["mlp"]["reasons"]) == (2, 6, {"shape": 2})


@pytest.mark.parametrize("whole", [False, True])
def test_projections_on_one_input_as_one_call(whole, builds):
    """q, k, v in one; gate and up with their norm in one, unless the whole MLP is one call already."""
    model = tiny()
    expected = serve(model)
    promoted = [
        item("linear", torch.float32, builds, "linear_packed", n=HIDDEN + 2 * KV * HIDDEN // HEADS, k=HIDDEN),
        item("rmsnorm_linear", torch.float32, builds, n=2 * INNER, k=HIDDEN),
    ]
    if whole:
        promoted.append(item("mlp", torch.float32, builds, hidden=HIDDEN, inner=INNER))
    handle = install(model, promoted, builds, threads=1)
    torch.testing.assert_close(serve(model), expected, atol=1e-4, rtol=1e-4)
    assert [c["taken"] for c in handle.counts()] == ([8, 0, 8] if whole else [8, 8])
    handle.remove()
    assert torch.equal(serve(model), expected)


@pytest.mark.parametrize("cache", ["static"])
def test_survives_torch_compile_and_counts(cache, builds):
    """One graph without breaks: every site is an opaque operator to the compiler."""
    model = tiny()
    expected = serve(model, cache)
    handle = install(model, everything(torch.float32, builds), builds, threads=1)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(serve(model, cache), expected, atol=1e-4, rtol=1e-4)
    assert [c["taken"] for c in handle.counts()] == [8, 12, 8, 4, 8]
    handle.remove()
    torch.testing.assert_close(serve(model, cache), expected, atol=1e-5, rtol=1e-5)
    assert [c["taken"] for c in handle.counts()] == [8, 12, 8, 4, 8]
    del model.forward
    assert torch.equal(serve(model, cache), expected)


def test_one_openmp_pool_in_the_process(builds):
    """The candidate's OpenMP regions run on torch's pool: a second libgomp would make the two fight for the cores."""

    def pools() -> set[str]:
        return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}

    known = pools()  # torch's, and those of other packages that some test has imported
    model = tiny()
    _, count = only(model, item("rmsnorm", torch.float32, builds, cols=HIDDEN), builds)
    serve(model)
    assert count()["taken"] > 0
    assert pools() == known
