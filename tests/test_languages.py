"""Loading candidates of each language and calling them on tensors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import languages
from kernels.errors import InputError
from kernels.problems import build, by_name
from kernels.ruler.build import BuildFailed
from kernels.ruler.spec import Candidate

THREADS = """
#include <omp.h>
#include <cstdint>
extern "C" void run_silu_mul(const float* x, const float* y, float* o, int64_t n) {
  #pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) o[i] = x[i] + y[i] + 100 * omp_get_num_threads();
}
"""

PACKED = """
#include <cstdint>
extern "C" int64_t prepare_rmsnorm_bytes(int64_t rows, int64_t cols) { return cols * 4 + rows; }
extern "C" void prepare_rmsnorm(const float* w, void* packed, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < cols; ++i) ((float*)packed)[i] = 2 * w[i];
}
extern "C" void run_rmsnorm(const float* x, const void* packed, float eps, float* y, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows * cols; ++i) y[i] = x[i] + ((const float*)packed)[i % cols] + eps;
}
"""


def cpp(source, operator, **more):
    return Candidate("cpp", source, f"run_{operator}", **more)


def thread_pools():
    maps = Path("/proc/self/maps").read_text()
    return {line.split()[-1] for line in maps.splitlines() if "gomp" in line or "iomp" in line}


def test_cpp_uses_torchs_own_thread_pool(tmp_path):
    known = thread_pools()  # torch's, and those of other packages that some test has imported
    assert any("/torch/" in pool for pool in known)
    loaded = languages.load(cpp(THREADS, "silu_mul"), by_name("silu_mul"), tmp_path)
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            x = torch.arange(6.0).view(2, 3)
            assert torch.equal(loaded(x, x), 2 * x + 100 * threads)
    finally:
        torch.set_num_threads(before)
    assert thread_pools() == known


def test_cpp_packs_constants_and_passes_scalars(tmp_path):
    problem = by_name("rmsnorm")
    loaded = languages.load(cpp(PACKED, "rmsnorm", prepares=True), build("rmsnorm", dtype="float32", cols=3,
        visible=[{"rows": 2}]), tmp_path)  # fmt: skip
    x, w = torch.ones(2, 3), torch.tensor([1.0, 2.0, 3.0])
    packed = loaded.prepare(w)
    assert packed.data_ptr() % 64 == 0
    assert loaded.prepared_bytes == 12
    w.zero_()  # the packing is a copy
    want = torch.tensor([[3.5, 5.5, 7.5]] * 2)
    assert torch.equal(loaded(x, packed, 0.5), want)
    assert torch.equal(loaded.bind(torch.tensor([1.0, 2.0, 3.0]))(x, 0.5), want)
    with pytest.raises(TypeError):
        languages.load(cpp(PACKED, "rmsnorm"), problem, tmp_path).prepare(w)


def test_several_outputs_come_back_as_a_tuple(tmp_path):
    source = """
    #include <cstdint>
    extern "C" void run_rotary(const float* q, const float* k, const float* c, const float* s, float* qo, float* ko,
                               int64_t rows, int64_t heads, int64_t kv, int64_t dim) {
      for (int64_t i = 0; i < rows * heads * dim; ++i) qo[i] = q[i] + 1;
      for (int64_t i = 0; i < rows * kv * dim; ++i) ko[i] = k[i] + 2;
    }"""
    problem = build("rotary", dtype="float32", heads=2, kv_heads=1, dim=4, visible=[{"rows": 3}])
    q, k, c = torch.rand(5, 2, 4), torch.rand(5, 1, 4), torch.rand(5, 4)
    qo, ko = languages.load(cpp(source, "rotary"), problem, tmp_path)(q, k, c, c)
    assert torch.equal(qo, q + 1)
    assert torch.equal(ko, k + 2)


def test_axis_arguments_may_be_expressions(tmp_path):
    source = """
    #include <cstdint>
    extern "C" void run_softmax(const float* x, float* y, int64_t count) {
      for (int64_t i = 0; i < count; ++i) y[i] = x[i] + count;
    }"""
    problem = dataclasses.replace(by_name("softmax"), c_axes=("rows*cols",))
    x = torch.rand(3, 5)
    assert torch.equal(languages.load(cpp(source, "softmax"), problem, tmp_path)(x), x + 15)


def test_python_candidates_run_in_modules_of_their_own(tmp_path):
    problem = by_name("silu_mul")
    source = "import torch\nseen = []\ndef run(x, y):\n    seen.append(1)\n    return x * y + len(seen)\n"
    one = languages.load(Candidate("torch", source, "run"), problem, tmp_path)
    x = torch.ones(2)
    assert one(x, x).tolist() == [2.0, 2.0]
    assert one(x, x).tolist() == [3.0, 3.0]
    assert languages.load(Candidate("torch", source + "#", "run"), problem, tmp_path)(x, x).tolist() == [2.0, 2.0]
    with pytest.raises(AttributeError):
        languages.load(Candidate("torch", source, "go"), problem, tmp_path)


def test_what_does_not_load_is_told(tmp_path):
    problem = by_name("silu_mul")
    with pytest.raises(InputError, match="Unknown language"):
        languages.load(Candidate("rust", "", "run"), problem, tmp_path)
    with pytest.raises(BuildFailed, match="run_silu_mul"):
        languages.load(cpp("int x;", "silu_mul"), problem, tmp_path)
    with pytest.raises(BuildFailed, match="error"):
        languages.load(cpp("int x", "silu_mul"), problem, tmp_path)


TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(x, y, o, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    tl.store(o + at, a / (1 + tl.exp(-a)) * tl.load(y + at, mask=at < n), mask=at < n)

def run(x, y):
    o = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 64),)](x, y, o, x.numel(), BLOCK=64)
    return o
"""

CHILD = """
import sys, torch
from pathlib import Path
from kernels import languages
from kernels.problems import by_name
from kernels.ruler.spec import Candidate
loaded = languages.load(Candidate("triton", sys.stdin.read(), "run"), by_name("silu_mul"), Path(sys.argv[1]))
x, y = torch.randn(131), torch.randn(131)
torch.testing.assert_close(loaded(x, y), torch.nn.functional.silu(x) * y)
"""


def test_triton_runs_in_its_interpreter(tmp_path):
    pytest.importorskip("triton")
    root = Path(languages.__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    argv = [sys.executable, "-c", CHILD, str(tmp_path)]
    done = subprocess.run(argv, input=TRITON, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    if not torch.cuda.is_available():
        env.pop("TRITON_INTERPRET")
        done = subprocess.run(argv, input=TRITON, env=env, capture_output=True, text=True, check=False, timeout=120)
        assert "TRITON_INTERPRET=1" in done.stderr
