"""The four problems of the adversarial set, at sizes that a test can afford."""

from kernels.ruler.spec import Candidate, Cost, Problem, Tensor

F = "float32"
ALL = ("normal", "large", "tiny", "mixed", "integer", "denormal", "zero_rows", "nonfinite")

RMSNORM = Problem(
    name="rmsnorm", operator="rmsnorm", axes={"rows": None, "cols": None},
    inputs=(Tensor("x", ("rows", "cols"), F), Tensor("w", ("cols",), F), Tensor("eps", None, F)),
    outputs=(Tensor("y", ("rows", "cols"), F),), scalars={"eps": 1e-6}, reduction_axes=("cols",),
    reference="import torch\ndef run(x, w, eps):\n"
    "    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w\n",
    vendor="import torch\ndef run(x, w, eps):\n    return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps)\n",
    cost=Cost("4*rows*cols", "4*(rows*cols+cols)", "4*rows*cols"), visible=({"rows": 256, "cols": 1024},), regimes=ALL,
)  # fmt: skip
SOFTMAX = Problem(
    name="softmax", operator="softmax", axes={"rows": None, "cols": None},
    inputs=(Tensor("x", ("rows", "cols"), F),), outputs=(Tensor("y", ("rows", "cols"), F),), reduction_axes=("cols",),
    reference="import torch\ndef run(x):\n    return torch.softmax(x, -1)\n",
    cost=Cost("5*rows*cols", "4*rows*cols", "4*rows*cols"), visible=({"rows": 256, "cols": 1024},), regimes=ALL,
)  # fmt: skip
MATMUL = Problem(
    name="matmul", operator="matmul", axes={"m": None, "n": None, "k": None},
    inputs=(Tensor("a", ("m", "k"), F), Tensor("b", ("k", "n"), F)), outputs=(Tensor("c", ("m", "n"), F),),
    reduction_axes=("k",), reference="def run(a, b):\n    return a @ b\n",
    cost=Cost("2*m*n*k", "4*(m*k+k*n)", "4*m*n"), visible=({"m": 192, "n": 192, "k": 256},),
    regimes=("normal", "large", "tiny", "mixed", "integer", "zero_rows", "nonfinite"),
)  # fmt: skip
SILU_MUL = Problem(
    name="silu_mul", operator="silu_mul", axes={"rows": None, "cols": None}, c_axes=("rows*cols",),
    inputs=(Tensor("x", ("rows", "cols"), F), Tensor("y", ("rows", "cols"), F)),
    outputs=(Tensor("o", ("rows", "cols"), F),),
    reference="import torch\ndef run(x, y):\n    return torch.nn.functional.silu(x) * y\n",
    cost=Cost("5*rows*cols", "8*rows*cols", "4*rows*cols"),
    visible=({"rows": 256, "cols": 1024},), regimes=ALL,
)  # fmt: skip
PROBLEMS = {p.name: p for p in (RMSNORM, SOFTMAX, MATMUL, SILU_MUL)}


def candidate(path):
    """A candidate file of the adversarial set."""
    operator = next(p for p in PROBLEMS if f"op: {p}" in path.read_text())
    cpp = path.suffix == ".cpp"
    return PROBLEMS[operator], Candidate(
        "cpp" if cpp else "torch", path.read_text(), f"run_{operator}" if cpp else "run", origin=f"file:{path.name}"
    )


LINEAR = Problem(
    name="linear_small", operator="linear", axes={"m": None, "n": 128, "k": 96},
    inputs=(Tensor("x", ("m", "k"), "bfloat16"), Tensor("w", ("n", "k"), "bfloat16", constant=True)),
    outputs=(Tensor("y", ("m", "n"), "bfloat16"),), reduction_axes=("k",),
    reference="import torch\ndef run(x, w):\n    return torch.nn.functional.linear(x, w)\n",
    cost=Cost("2*m*n*k", "2*(m*k+n*k)", "2*m*n", "bfloat16"), visible=({"m": 8},), hidden=({"m": 1}, {"m": 13}),
    regimes=("normal", "integer", "zero_rows"),
)  # fmt: skip
