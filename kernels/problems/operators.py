"""The operators that problems are built from: axes, tensors, a torch reference, fewest bytes and operations.

A description here plus axis values and a dtype gives a `Problem`. References are dtype-agnostic: float64 inputs give
the truth, bfloat16 inputs do what the stock model does (the same roundings in the same places).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernels.ruler.spec import Cost, Tensor

VALUE = "value"
"""Stands for the dtype that the problem is built with."""

SMOOTH = ("normal", "large", "tiny", "mixed", "zero_rows")
"""Regimes of operators that may be handed anything finite."""


@dataclass(frozen=True)
class Operator:
    """One kind of problem, before its axes have values."""

    name: str
    axes: tuple[str, ...]
    variable: tuple[str, ...]
    """Axes that vary from call to call in a model; the others are fixed by its weights."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    reference: str
    cost: Cost
    reduction_axes: tuple[str, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    vendor: str | None = None
    regimes: tuple[str, ...] = SMOOTH
    description: str = ""


def _tensor(name: str, *shape: str, dtype: str = VALUE, constant: bool = False) -> Tensor:
    return Tensor(name, shape, dtype, constant)


_EPS = Tensor("eps", None, "float32")

_WIDE = """import torch
import torch.nn.functional as F


def wide(t):
    return t.float() if t.dtype.itemsize < 4 else t


"""
"""Stock code normalises in float32 when the model is bf16, and in its own dtype otherwise."""

_NORM = """def norm(x, weight, eps):
    h = wide(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


"""

_ROTATE = """def rotate(t, cos, sin):
    half = t.shape[-1] // 2
    turned = torch.cat((-t[..., half:], t[..., :half]), dim=-1)
    return t * cos[:, None, :] + turned * sin[:, None, :]


"""

_ATTENTION = """import torch
import torch.nn.functional as F


def run(q, k, v, last):
    batch, kv_heads, length, dim = k.shape
    seen = torch.arange(length, device=k.device) <= last[:, None]
    grouped = q.reshape(batch, kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None, :])
    return out.reshape(q.shape)
"""

_ALL = (
    Operator(
        name="rmsnorm",
        axes=("rows", "cols"),
        variable=("rows",),
        inputs=(_tensor("x", "rows", "cols"), _tensor("w", "cols", constant=True), _EPS),
        outputs=(_tensor("y", "rows", "cols"),),
        reference=_WIDE + _NORM + "def run(x, w, eps):\n    return norm(x, w, eps)\n",
        vendor="import torch.nn.functional as F\n\n\ndef run(x, w, eps):\n"
        "    return F.rms_norm(x, (x.shape[-1],), w, eps)\n",
        cost=Cost("4*rows*cols", "B*(rows*cols+cols)", "B*rows*cols"),
        reduction_axes=("cols",),
        scalars={"eps": 1e-5},
        description="y = w · x / sqrt(mean(x²) + eps), row by row; bf16 is rounded before the weight, as Llama does.",
    ),
    Operator(
        name="linear",
        axes=("m", "n", "k"),
        variable=("m",),
        inputs=(_tensor("x", "m", "k"), _tensor("w", "n", "k", constant=True)),
        outputs=(_tensor("y", "m", "n"),),
        reference="import torch.nn.functional as F\n\n\ndef run(x, w):\n    return F.linear(x, w)\n",
        cost=Cost("2*m*n*k", "B*(m*k+n*k)", "B*m*n", VALUE),
        reduction_axes=("k",),
        description="y = x · wᵀ with a constant weight.",
    ),
    Operator(
        name="silu_mul",
        axes=("n",),
        variable=("n",),
        inputs=(_tensor("x", "n"), _tensor("y", "n")),
        outputs=(_tensor("o", "n"),),
        reference="import torch.nn.functional as F\n\n\ndef run(x, y):\n    return F.silu(x) * y\n",
        cost=Cost("12*n", "2*B*n", "B*n"),
        description="o = silu(x) · y, the gate of SwiGLU.",
    ),
    Operator(
        name="mlp",
        axes=("m", "hidden", "inner"),
        variable=("m",),
        inputs=(
            _tensor("x", "m", "hidden"),
            _tensor("gate", "inner", "hidden", constant=True),
            _tensor("up", "inner", "hidden", constant=True),
            _tensor("down", "hidden", "inner", constant=True),
        ),
        outputs=(_tensor("y", "m", "hidden"),),
        reference="import torch.nn.functional as F\n\n\ndef run(x, gate, up, down):\n"
        "    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)\n",
        cost=Cost("6*m*hidden*inner", "B*(m*hidden+3*hidden*inner)", "B*m*hidden", VALUE),
        reduction_axes=("inner",),
        regimes=("normal", "zero_rows"),
        description="The whole SwiGLU block: down(silu(gate(x)) · up(x)).",
    ),
    Operator(
        name="rmsnorm_linear",
        axes=("m", "n", "k"),
        variable=("m",),
        inputs=(
            _tensor("x", "m", "k"),
            _tensor("norm_weight", "k", constant=True),
            _tensor("w", "n", "k", constant=True),
            _EPS,
        ),
        outputs=(_tensor("y", "m", "n"),),
        reference=_WIDE + _NORM + "def run(x, norm_weight, w, eps):\n    return norm(x, norm_weight, eps) @ w.t()\n",
        vendor="import torch.nn.functional as F\n\n\ndef run(x, norm_weight, w, eps):\n"
        "    return F.linear(F.rms_norm(x, (x.shape[-1],), norm_weight, eps), w)\n",
        cost=Cost("2*m*n*k", "B*(m*k+k+n*k)", "B*m*n", VALUE),
        reduction_axes=("k",),
        scalars={"eps": 1e-5},
        description="A norm and the linear layer(s) behind it; several layers on one input stack along n.",
    ),
    Operator(
        name="softmax",
        axes=("rows", "cols"),
        variable=("rows", "cols"),
        inputs=(_tensor("x", "rows", "cols"),),
        outputs=(_tensor("y", "rows", "cols"),),
        reference="import torch\n\n\ndef run(x):\n    e = torch.exp(x - x.amax(-1, keepdim=True))\n"
        "    return e / e.sum(-1, keepdim=True)\n",
        vendor="import torch.nn.functional as F\n\n\ndef run(x):\n    return F.softmax(x, dim=-1)\n",
        cost=Cost("10*rows*cols", "B*rows*cols", "B*rows*cols"),
        reduction_axes=("cols",),
        description="Softmax over the last axis.",
    ),
    Operator(
        name="matmul",
        axes=("m", "n", "k"),
        variable=("m", "n", "k"),
        inputs=(_tensor("a", "m", "k"), _tensor("b", "k", "n")),
        outputs=(_tensor("c", "m", "n"),),
        reference="def run(a, b):\n    return a @ b\n",
        cost=Cost("2*m*n*k", "B*(m*k+k*n)", "B*m*n", VALUE),
        reduction_axes=("k",),
        description="c = a · b, both new at every call.",
    ),
    Operator(
        name="rotary",
        axes=("rows", "heads", "kv_heads", "dim"),
        variable=("rows",),
        inputs=(
            _tensor("q", "rows", "heads", "dim"),
            _tensor("k", "rows", "kv_heads", "dim"),
            _tensor("cos", "rows", "dim"),
            _tensor("sin", "rows", "dim"),
        ),
        outputs=(_tensor("q_out", "rows", "heads", "dim"), _tensor("k_out", "rows", "kv_heads", "dim")),
        reference="import torch\n\n\n" + _ROTATE + "def run(q, k, cos, sin):\n"
        "    return rotate(q, cos, sin), rotate(k, cos, sin)\n",
        cost=Cost("3*rows*(heads+kv_heads)*dim", "B*rows*((heads+kv_heads)*dim+2*dim)", "B*rows*(heads+kv_heads)*dim"),
        regimes=("normal", "large", "tiny", "zero_rows"),
        description="Rotary position embedding of queries and keys, halves rotated as Llama does.",
    ),
    Operator(
        name="attention_decode",
        axes=("batch", "heads", "kv_heads", "length", "dim"),
        variable=("batch", "length"),
        inputs=(
            _tensor("q", "batch", "heads", "dim"),
            Tensor("k", ("batch", "kv_heads", "length", "dim"), VALUE, resident=True),
            Tensor("v", ("batch", "kv_heads", "length", "dim"), VALUE, resident=True),
            Tensor("last", ("batch",), "int64", high="length"),
        ),
        outputs=(_tensor("o", "batch", "heads", "dim"),),
        reference=_ATTENTION,
        # Only positions up to `last` have to be read; drawn evenly, it leaves (length + 1) / 2 of them on average.
        cost=Cost(
            "2*batch*heads*(length+1)*dim",
            "B*(batch*heads*dim+batch*kv_heads*(length+1)*dim)+8*batch",
            "B*batch*heads*dim",
            VALUE,
        ),
        reduction_axes=("length",),
        regimes=("normal", "zero_rows"),
        description="One new token per sequence attends over positions 0 to `last` of its cache, what lies behind does "
        "not count; grouped queries (heads / kv_heads neighbours share keys and values), scale 1/sqrt(dim).",
    ),
)

OPERATORS: Mapping[str, Operator] = {operator.name: operator for operator in _ALL}
