"""Planted bugs in good kernels: each must be found. The classic check (one shape, uniform inputs, allclose 1e-2) is
shown beside: what it finds is printed by `make bench-ruler`."""

import ctypes
import dataclasses

import pytest
import torch
from ruler_problems import MATMUL, RMSNORM, SILU_MUL, SOFTMAX

from kernels.ruler import build
from kernels.ruler.compare import load_reference
from kernels.ruler.judge import judge
from kernels.ruler.spec import Candidate

GOOD = {
    "rmsnorm": """#include <cmath>
#include <cstdint>
extern "C" void run_rmsnorm(const float* x, const float* w, float eps, float* y, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = x + r * cols;
    float* b = y + r * cols;
    float s = 0;
    for (int64_t i = 0; i < cols; ++i) s += a[i] * a[i];
    float k = 1.f / std::sqrt(s / cols + eps);
    for (int64_t i = 0; i < cols; ++i) b[i] = a[i] * k * w[i];
  }
}
""",
    "softmax": """#include <cmath>
#include <cstdint>
extern "C" void run_softmax(const float* x, float* y, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = x + r * cols;
    float* b = y + r * cols;
    float m = a[0], s = 0;
    for (int64_t i = 1; i < cols; ++i) m = !(a[i] <= m) ? a[i] : m;
    for (int64_t i = 0; i < cols; ++i) { b[i] = std::exp(a[i] - m); s += b[i]; }
    for (int64_t i = 0; i < cols; ++i) b[i] /= s;
  }
}
""",
    "matmul": """#include <cstdint>
extern "C" void run_matmul(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) c[i * n + j] = 0;
    for (int64_t l = 0; l < k; ++l) {
      float v = a[i * k + l];
      for (int64_t j = 0; j < n; ++j) c[i * n + j] += v * b[l * n + j];
    }
  }
}
""",
    "silu_mul": """#include <cmath>
#include <cstdint>
extern "C" void run_silu_mul(const float* x, const float* y, float* o, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float v = x[i];
    o[i] = v / (1.f + std::exp(-v)) * y[i];
  }
}
""",
}
# (operator, name, what is replaced, by what)
BUGS = [
    ("rmsnorm", "last element skipped", "i < cols; ++i) b[i]", "i + 1 < cols; ++i) b[i]"),
    ("rmsnorm", "first element left out of the sum", "i = 0; i < cols; ++i) s +=", "i = 1; i < cols; ++i) s +="),
    ("rmsnorm", "tail of 16 left out of the sum", "i < cols; ++i) s +=", "i < cols / 16 * 16; ++i) s +="),
    ("rmsnorm", "last row skipped", "r < rows; ++r", "r < rows - (rows > 1); ++r"),
    ("rmsnorm", "no eps", "cols + eps)", "cols)"),
    ("rmsnorm", "eps outside the root", "std::sqrt(s / cols + eps)", "(std::sqrt(s / cols) + eps)"),
    ("rmsnorm", "fixed eps", "cols + eps)", "cols + 1e-5f)"),
    ("rmsnorm", "fixed length", "s / cols", "s / 1024"),
    ("rmsnorm", "length minus one", "s / cols", "s / (cols > 1 ? cols - 1 : 1)"),
    ("rmsnorm", "no weight", " * w[i]", ""),
    ("rmsnorm", "weight plus one", "* w[i]", "* (1 + w[i])"),
    ("rmsnorm", "weight indexed by row", "* w[i]", "* w[r % cols]"),
    ("rmsnorm", "absolute instead of square", "s += a[i] * a[i]", "s += std::fabs(a[i])"),
    ("rmsnorm", "half-precision sum", "s += a[i] * a[i];", "s = (float)(_Float16)(s + a[i] * a[i]);"),
    ("rmsnorm", "low-precision factor", "float k = 1.f / std::sqrt(s / cols + eps)",
     "float k = (float)(_Float16)(1.f / std::sqrt(s / cols + eps))"),
    ("rmsnorm", "sum kept from row to row", "float s = 0;", "static float s; if (r == 0) s = 0;"),
    ("softmax", "no maximum", "a[i] - m", "a[i]"),
    ("softmax", "maximum of the absolute", "m = !(a[i] <= m) ? a[i] : m",
     "m = std::fabs(a[i]) > m ? std::fabs(a[i]) : m"),
    ("softmax", "maximum of the first 16", "i = 1; i < cols; ++i) m", "i = 1; i < (cols < 16 ? cols : 16); ++i) m"),
    ("softmax", "sum misses the last", "i < cols; ++i) { b[i]", "i < cols - (cols > 1); ++i) { b[i]"),
    ("softmax", "sum starts at one", "m = a[0], s = 0", "m = a[0], s = 1"),
    ("softmax", "sum starts at eps", "m = a[0], s = 0", "m = a[0], s = 1e-5f"),
    ("softmax", "last element not divided", "i < cols; ++i) b[i] /=", "i + 1 < cols; ++i) b[i] /="),
    ("softmax", "even rows only", "++r) {", "r += 2) {"),
    ("softmax", "rows packed to 16", "y + r * cols", "y + r * (cols / 16 * 16 + (cols < 16 ? cols : 0))"),
    ("softmax", "base two", "std::exp(a[i] - m)", "std::exp2(a[i] - m)"),
    ("softmax", "clamped exponent", "std::exp(a[i] - m)", "std::exp(a[i] - m < -20 ? -20 : a[i] - m)"),
    ("softmax", "half-precision exponential", "b[i] = std::exp(a[i] - m)",
     "b[i] = (float)(_Float16)std::exp(a[i] - m)"),
    ("softmax", "masked entries count", "std::exp(a[i] - m)", "(a[i] - m < -1e30f ? 1 : std::exp(a[i] - m))"),
    ("matmul", "last term left out", "l < k; ++l", "l + 1 < k; ++l"),
    ("matmul", "terms in blocks of eight", "l < k; ++l", "l < (k < 8 ? k : k / 8 * 8); ++l"),
    ("matmul", "columns in blocks of eight", "j < n; ++j) c[i * n + j] +=",
     "j < (n < 8 ? n : n / 8 * 8); ++j) c[i * n + j] +="),
    ("matmul", "swapped stride", "b[l * n + j]", "b[(l * n + j) % (k * n) == 0 ? 0 : (j * k + l) % (k * n)]"),
    ("matmul", "output not cleared", "c[i * n + j] = 0", "c[i * n + j] += 0"),
    ("matmul", "bfloat16 sums", "c[i * n + j] += v * b[l * n + j]",
     "{ float t = c[i * n + j] + v * b[l * n + j]; uint32_t u; __builtin_memcpy(&u, &t, 4); u &= 0xffff0000u;"
     " __builtin_memcpy(&c[i * n + j], &u, 4); }"),
    ("matmul", "zeros skipped", "float v = a[i * k + l];", "float v = a[i * k + l]; if (v == 0) continue;"),
    ("matmul", "last row skipped", "i < m; ++i", "i < m - (m > 1); ++i"),
    ("matmul", "row of the neighbour", "a[i * k + l]", "a[(i + (i == m - 1 && i > 0 ? -1 : 0)) * k + l]"),
    ("silu_mul", "tail of eight skipped", "i < n; ++i", "i < (n < 8 ? n : n / 8 * 8); ++i"),
    ("silu_mul", "sigmoid only", "v / (1.f", "1.f / (1.f"),
    ("silu_mul", "no product", " * y[i]", ""),
    ("silu_mul", "wrong sign", "std::exp(-v)", "std::exp(v)"),
    ("silu_mul", "clamped at 20", "float v = x[i];", "float v = x[i] > 20 ? 20 : x[i];"),
    ("silu_mul", "clamped at -10", "std::exp(-v)", "std::exp(v < -10 ? 10.f : -v)"),
    ("silu_mul", "quick gelu", "std::exp(-v)", "std::exp(-1.702f * v)"),
    ("silu_mul", "half-precision result", "o[i] = v / (1.f + std::exp(-v)) * y[i]",
     "o[i] = (float)(_Float16)(v / (1.f + std::exp(-v)) * y[i])"),
    ("silu_mul", "infinities flushed", "float v = x[i];", "float v = std::isinf(x[i]) ? 0 : x[i];"),
    ("silu_mul", "shifted input", "y[i];\n", "y[i + 1 < n ? i : 0];\n"),
]  # fmt: skip
PROBLEMS = {
    "rmsnorm": dataclasses.replace(RMSNORM, visible=({"rows": 16, "cols": 256},)),
    "softmax": dataclasses.replace(SOFTMAX, visible=({"rows": 16, "cols": 256},)),
    "matmul": dataclasses.replace(MATMUL, visible=({"m": 32, "n": 48, "k": 64},)),
    "silu_mul": dataclasses.replace(SILU_MUL, visible=({"rows": 16, "cols": 256},)),
}
QUICK = ("tail of 16 left out of the sum", "fixed eps", "no maximum", "half-precision exponential", "bfloat16 sums",
         "terms in blocks of eight", "clamped at 20", "tail of eight skipped")  # fmt: skip


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    return tmp_path_factory.mktemp("builds")


def planted(bug):
    operator, name, old, new = bug
    assert GOOD[operator].count(old) >= 1, f"{operator}: {name} does not apply"
    return operator, Candidate("cpp", GOOD[operator].replace(old, new), f"run_{operator}")


def verdict_of(operator, candidate, builds):
    return judge(PROBLEMS[operator], candidate, mode="screen", ceilings=None, threads=1, builds=builds, budget_s=0.2)


def classic_finds(operator, candidate, builds):
    """One shape, uniform inputs, allclose at 1e-2."""
    problem = PROBLEMS[operator]
    library = ctypes.CDLL(str(build.build(candidate, problem, builds).path))
    axes = problem.axis_values(problem.visible[0])
    values = [
        torch.rand([axes[n] for n in t.shape]) if t.shape is not None else problem.scalars[t.name]
        for t in problem.inputs
    ]
    expected = load_reference(problem.reference)(*values)
    got = torch.empty_like(expected)
    given = [
        ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else ctypes.c_float(v) for v in (*values, got)
    ]
    getattr(library, candidate.entry)(*given, *[ctypes.c_int64(v) for v in problem.c_values(problem.visible[0])])
    return not torch.allclose(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("operator", GOOD)
def test_the_kernels_without_a_bug_are_accepted(operator, builds):
    verdict = verdict_of(operator, Candidate("cpp", GOOD[operator], f"run_{operator}"), builds)
    assert verdict.status in ("valid", "unresolved"), (verdict.reason, verdict.first_error)


@pytest.mark.parametrize(
    "bug",
    [b if b[1] in QUICK else pytest.param(b, marks=pytest.mark.slow) for b in BUGS],
    ids=lambda b: f"{b[0]}: {b[1]}",
)
def test_every_planted_bug_is_found(bug, builds):
    verdict = verdict_of(*planted(bug), builds)
    assert verdict.status in ("incorrect", "void", "crashed"), f"{bug[:2]}: {verdict.status}"


def test_there_are_enough_bugs():
    assert len({(bug[0], bug[1]) for bug in BUGS}) >= 40
