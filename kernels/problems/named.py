"""Four float32 problems that every machine can judge, with every axis free and every value regime legal.

C signatures: `run_rmsnorm(x, w, eps, y, rows, cols)`, `run_softmax(x, y, rows, cols)`, `run_matmul(a, b, c, m, n, k)`
and, one-dimensional in C, `run_silu_mul(x, y, o, n)`.
"""

from __future__ import annotations

from kernels.ruler.spec import Cost, Problem, Tensor

_F = "float32"
_ALL = ("normal", "large", "tiny", "mixed", "integer", "denormal", "zero_rows", "nonfinite")

_PROBLEMS = (
    Problem(
        name="rmsnorm", operator="rmsnorm", axes={"rows": None, "cols": None},
        inputs=(Tensor("x", ("rows", "cols"), _F), Tensor("w", ("cols",), _F), Tensor("eps", None, _F)),
        outputs=(Tensor("y", ("rows", "cols"), _F),), scalars={"eps": 1e-6}, reduction_axes=("cols",),
        reference="import torch\n\n\ndef run(x, w, eps):\n"
        "    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w\n",
        vendor="import torch.nn.functional as F\n\n\ndef run(x, w, eps):\n"
        "    return F.rms_norm(x, (x.shape[-1],), w, eps)\n",
        cost=Cost("4*rows*cols", "4*(rows*cols+cols)", "4*rows*cols"), regimes=_ALL,
        visible=({"rows": 512, "cols": 1024}, {"rows": 64, "cols": 4096}),
        description="y = x / sqrt(mean(x²) + eps) · w, row by row.",
    ),
    Problem(
        name="softmax", operator="softmax", axes={"rows": None, "cols": None},
        inputs=(Tensor("x", ("rows", "cols"), _F),), outputs=(Tensor("y", ("rows", "cols"), _F),),
        reduction_axes=("cols",), reference="import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n",
        cost=Cost("5*rows*cols", "4*rows*cols", "4*rows*cols"), regimes=_ALL,
        visible=({"rows": 512, "cols": 1024}, {"rows": 64, "cols": 4096}), description="y = softmax of each row.",
    ),
    Problem(
        name="matmul", operator="matmul", axes={"m": None, "n": None, "k": None},
        inputs=(Tensor("a", ("m", "k"), _F), Tensor("b", ("k", "n"), _F)), outputs=(Tensor("c", ("m", "n"), _F),),
        reduction_axes=("k",), reference="def run(a, b):\n    return a @ b\n",
        cost=Cost("2*m*n*k", "4*(m*k+k*n)", "4*m*n"),
        regimes=("normal", "large", "tiny", "mixed", "integer", "zero_rows", "nonfinite"),
        visible=({"m": 256, "n": 256, "k": 256}, {"m": 64, "n": 512, "k": 384}), description="c = a · b.",
    ),
    Problem(
        name="silu_mul", operator="silu_mul", axes={"rows": None, "cols": None}, c_axes=("rows*cols",),
        inputs=(Tensor("x", ("rows", "cols"), _F), Tensor("y", ("rows", "cols"), _F)),
        outputs=(Tensor("o", ("rows", "cols"), _F),),
        reference="import torch.nn.functional as F\n\n\ndef run(x, y):\n    return F.silu(x) * y\n",
        cost=Cost("5*rows*cols", "8*rows*cols", "4*rows*cols"), regimes=_ALL,
        visible=({"rows": 512, "cols": 1024}, {"rows": 64, "cols": 1024}), description="o = silu(x) · y.",
    ),
)  # fmt: skip

NAMED = {problem.name: problem for problem in _PROBLEMS}
