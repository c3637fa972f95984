"""The four problems of the adversarial set, at sizes that a test can afford."""

from kernels.ruler.spec import Candidate, Cost, Problem, Tensor

F = "float32"
ALL = ("normal", "large", "tiny", "mixed", "integer", "denormal", "zero_rows", "nonfinite")

RMSNORM = Problem(
    name="rmsnorm", operator="rmsnorm", axes={"rows": None, "cols": None},
    inputs=(Tensor("x", ("rows", "cols"), F), Tensor("w", ("cols",), F), Tensor("eps", None, F)),
    outputs=(Tensor("y", ("rows", "cols"), F),), scalars={"eps": 1e-6}, reduction_axes=("cols",),
    reference="import torch\ndef run(x, w, eps):\n    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w\n",
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
    name="silu_mul", operator="silu_mul", axes={"n": None},
    inputs=(Tensor("x", ("n",), F), Tensor("y", ("n",), F)), outputs=(Tensor("o", ("n",), F),),
    reference="import torch\ndef run(x, y):\n    return torch.nn.functional.silu(x) * y\n",
    cost=Cost("5*n", "8*n", "4*n"), visible=({"n": 262144},), regimes=ALL,
)  # fmt: skip
PROBLEMS = {p.name: p for p in (RMSNORM, SOFTMAX, MATMUL, SILU_MUL)}


def candidate(path):
    """A candidate file of the adversarial set."""
    operator = next(p for p in PROBLEMS if f"op: {p}" in path.read_text())
    cpp = path.suffix == ".cpp"
    return PROBLEMS[operator], Candidate(
        "cpp" if cpp else "torch", path.read_text(), f"run_{operator}" if cpp else "run", origin=f"file:{path.name}"
    )
