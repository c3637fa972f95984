"""The four problems of the adversarial set, at sizes that a test can afford."""

from dataclasses import replace

from kernels.problems.named import NAMED
from kernels.ruler.spec import Candidate, Cost, Problem, Tensor

SIZES = {"rmsnorm": {"rows": 256, "cols": 1024}, "softmax": {"rows": 256, "cols": 1024},
         "matmul": {"m": 192, "n": 192, "k": 256}, "silu_mul": {"rows": 256, "cols": 1024}}  # fmt: skip
PROBLEMS = {name: replace(problem, visible=(SIZES[name],)) for name, problem in NAMED.items()}
RMSNORM, SOFTMAX, MATMUL, SILU_MUL = PROBLEMS.values()


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
