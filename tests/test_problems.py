"""Problems: built, named, imported and exported; what is wrong with an input is told."""

from __future__ import annotations

import json

import pytest
import torch

from kernels import problems
from kernels.errors import InputError
from kernels.problems import flashinfer, kernelbench
from kernels.problems.hidden import hidden_shapes
from kernels.problems.operators import OPERATORS
from kernels.ruler.compare import load_reference, outputs_of
from kernels.ruler.inputs import REGIMES
from kernels.ruler.spec import Candidate

SIZES = {"heads": 4, "kv_heads": 2, "dim": 8}


def tensors(problem, dtype=None):
    axes = problem.axis_values(problem.visible[0])
    for t in problem.inputs:
        if t.shape is None:
            yield problem.scalars[t.name]
        elif "int" in t.dtype:
            yield torch.randint(eval(t.high, {}, axes), [axes[a] for a in t.shape])
        else:
            yield torch.randn([axes[a] for a in t.shape]).to(dtype or getattr(torch, t.dtype))


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_runs_in_its_dtype_and_in_float64(operator):
    spec = OPERATORS[operator]
    constants = {axis: SIZES.get(axis, 12) for axis in spec.axes if axis not in spec.variable}
    visible = [dict.fromkeys(spec.variable, 5)]
    problem = problems.build(operator, visible=visible, seed=1, **constants)
    run, axes = load_reference(problem.reference), problem.axis_values(visible[0])
    arguments = list(tensors(problem))
    for dtype in (torch.bfloat16, torch.float64):
        cast = [a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
        for got, want in zip(outputs_of(run(*cast)), problem.outputs, strict=True):
            assert got.dtype == dtype
            assert list(got.shape) == [axes[a] for a in want.shape]
    if problem.vendor:
        torch.testing.assert_close(
            load_reference(problem.vendor)(*arguments).float(), run(*arguments).float(), rtol=0.05, atol=0.05
        )
    for expression in (problem.cost.flops, problem.cost.bytes_read, problem.cost.bytes_written):
        assert eval(expression, {}, axes) > 0
    assert set(problem.regimes) <= set(REGIMES)
    assert set(problem.reduction_axes) <= set(problem.axes)


def test_cost_of_a_linear_counts_weights_in_the_dtype():
    problem = problems.build("linear", n=576, k=192, visible=[{"m": 8}], seed=0)
    axes = problem.axis_values({"m": 8})
    assert eval(problem.cost.bytes_read, {}, axes) == 2 * (8 * 192 + 576 * 192)
    assert eval(problem.cost.flops, {}, axes) == 2 * 8 * 576 * 192
    assert problem.cost.dtype == "bfloat16"


def test_hidden_shapes_follow_the_seed_and_stay_out_of_the_id():
    shapes = [{"m": 8}, {"m": 1024}]
    one, same, other, secret = (
        problems.build("linear", n=64, k=64, visible=shapes, seed=seed) for seed in (1, 1, 2, None)
    )
    assert one.hidden == same.hidden != other.hidden
    assert one.id == other.id == secret.id
    assert {"m": 1} in one.hidden
    assert not any(shape in shapes for shape in one.hidden)
    assert all(1 <= shape["m"] <= 2048 for shape in one.hidden)
    assert any(shape["m"] % 16 for shape in one.hidden)


def test_hidden_shapes_are_distinct_and_not_visible():
    for seed in range(20):
        shapes = hidden_shapes([{"m": 1}, {"m": 2}, {"m": 3}], ("m",), seed=seed)
        assert len({shape["m"] for shape in shapes}) == len(shapes)
        assert not {shape["m"] for shape in shapes} & {1, 2, 3}


def test_hidden_shapes_of_two_axes_are_tall_and_wide():
    hidden = problems.by_name("softmax", seed=5).hidden
    assert any(shape["rows"] > 50 * shape["cols"] for shape in hidden)
    assert any(shape["cols"] > 50 * shape["rows"] for shape in hidden)


def test_named_problems_have_the_agreed_signatures():
    arguments = {name: [t.name for t in problems.by_name(name, seed=0).inputs] for name in problems.NAMES}
    assert arguments == {"rmsnorm": ["x", "w", "eps"], "softmax": ["x"], "matmul": ["a", "b"], "silu_mul": ["x", "y"]}
    assert list(problems.by_name("matmul").axes) == ["m", "n", "k"]
    assert {t.dtype for name in problems.NAMES for t in problems.by_name(name).inputs} == {"float32"}
    assert problems.load("softmax", seed=0).id == problems.by_name("softmax").id


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: problems.build("liner"), "did you mean 'linear'"),
        (lambda: problems.build("linear", dtype="bf16", n=1, k=1, visible=[{"m": 1}]), "dtype"),
        (lambda: problems.build("linear", n=1, q=1, visible=[{"m": 1}]), "axis of linear"),
        (lambda: problems.build("linear", n=0, k=1, visible=[{"m": 1}]), "linear.n"),
        (lambda: problems.build("linear", n=1, k=1), "No shape gives values to m"),
        (lambda: problems.build("linear", n=1, k=1, visible=[{"rows": 1}]), "axis of linear"),
        (lambda: problems.build("linear", n=1, k=1, visible=[{"m": 0}]), "linear.m"),
        (
            lambda: problems.build("rmsnorm", cols=1, visible=[{"rows": 1}], scalars={"epsilon": 1}),
            "did you mean 'eps'",
        ),
        (lambda: problems.by_name("relu"), "Unknown problem"),
        (lambda: problems.load("sofmax"), "did you mean 'softmax'"),
    ],
)
def test_bad_input_is_told(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_attention_of_one_token_is_that_of_the_positions_before_it():
    problem = problems.build("attention_decode", dtype="float32", visible=[{"batch": 3, "length": 5}], seed=0, **SIZES)
    q, k, v = list(tensors(problem))[:3]
    last = torch.tensor([0, 2, 4])
    got = load_reference(problem.reference)(q, k, v, last)
    for row, end in enumerate((1, 3, 5)):
        for head in range(4):
            keys, values = k[row, head // 2, :end], v[row, head // 2, :end]
            weights = torch.softmax(keys @ q[row, head] / 8**0.5, 0)
            torch.testing.assert_close(got[row, head], weights @ values)


@pytest.mark.parametrize(
    ("operator", "shapes", "constants"),
    [
        ("rmsnorm", [{"rows": 4}, {"rows": 9}], {"cols": 64}),
        ("attention_decode", [{"batch": 4, "length": 9}], SIZES),
    ],
)
def test_definition_comes_back_as_the_same_problem(operator, shapes, constants, tmp_path):
    problem = problems.build(operator, visible=shapes, seed=3, **constants)
    (tmp_path / "p.json").write_text(json.dumps(flashinfer.definition(problem)))
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(line) for line in flashinfer.workloads(problem)))
    back = problems.load(tmp_path / "p.json", seed=3)
    for key in ("name", "operator", "axes", "inputs", "outputs", "reference", "visible", "hidden", "scalars"):
        assert getattr(back, key) == getattr(problem, key), key
    assert back.reduction_axes == problem.reduction_axes
    if operator == "rmsnorm":  # attention need not read all of its inputs
        axes = problem.axis_values(shapes[0])
        assert eval(back.cost.bytes_read, {}, axes) == eval(problem.cost.bytes_read, {}, axes)
    assert "hidden" not in json.dumps(flashinfer.definition(problem))


def test_solution_comes_back_as_the_same_candidate(tmp_path):
    problem = problems.by_name("softmax", seed=0)
    candidate = Candidate("cpp", "void f();", "run_softmax", prepares=True, parameters={"a": 1}, origin="me")
    (tmp_path / "s.json").write_text(json.dumps(flashinfer.solution(candidate, problem)))
    assert flashinfer.load_solution(tmp_path / "s.json") == candidate


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reference": ""}, "reference"),
        ({"reference": "def go(x):\n  return x"}, "no function `run`"),
        ({"reference": "def run(:"}, "not Python"),
        ({"inputs": {"x": {"shape": ["n"], "dtype": "float8_e4m3"}}}, "inputs.x"),
        ({"inputs": {"x": {"shape": ["q"], "dtype": "float32"}}}, "'q' is not declared"),
        ({"axes": {"n": {"type": "var"}}}, "no workload"),
        ({"axes": {"n": {"type": "const", "value": 0}}}, "axes.n"),
    ],
)
def test_broken_definitions_are_told(tmp_path, change, says):
    data = {
        "name": "copy",
        "axes": {"n": {"type": "const", "value": 4}},
        "inputs": {"x": {"shape": ["n"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["n"], "dtype": "float32"}},
        "reference": "def run(x):\n    return x.clone()",
    }
    file = tmp_path / "copy.json"
    file.write_text(json.dumps(data))
    assert problems.load(file).visible == ({},)
    file.write_text(json.dumps(data | change))
    with pytest.raises(InputError, match=says) as caught:
        problems.load(file)
    assert str(file) in str(caught.value)


KERNELBENCH = """
import torch
from torch import nn

class {name}(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 3)
    def forward(self, x):
        return torch.relu(self.layer(x))

def get_inputs():
    return [torch.randn(5, 8)]

def get_init_inputs():
    return [8]
"""


def test_kernelbench_file_and_its_candidate_share_weights(tmp_path):
    (tmp_path / "19_ReluLinear.py").write_text(KERNELBENCH.format(name="Model"))
    (tmp_path / "new.py").write_text(KERNELBENCH.format(name="ModelNew"))
    problem = problems.load(tmp_path / "19_ReluLinear.py")
    assert problem.operator == "relulinear"
    assert dict(problem.axes) == {"d5": 5, "d8": 8, "d3": 3}
    assert [(t.shape, t.dtype) for t in problem.outputs] == [(("d5", "d3"), "float32")]
    candidate = kernelbench.load_candidate(tmp_path / "new.py")
    x = torch.randn(5, 8)
    reference, new = load_reference(problem.reference), load_reference(candidate.source)
    expected = reference(x)
    torch.randn(1)  # the weights must not hang on the generator's state
    assert torch.equal(expected, new(x))
    assert reference(x.double()).dtype is torch.float64


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (KERNELBENCH.format(name="Net"), "Model"),
        (KERNELBENCH.format(name="Model").replace("[torch.randn(5, 8)]", "[torch.randn(5, 9)]"), "does not run"),
        (
            KERNELBENCH.format(name="Model").replace("[torch.randn(5, 8)]", "open('/tmp/x', 'w').write('x' * 9)"),
            "not run",
        ),
        (KERNELBENCH.format(name="Model").replace("return [8]", "while True: pass"), "did not finish"),
        ("class Model(:", "not Python"),
    ],
)
def test_broken_kernelbench_files_are_told(tmp_path, source, says):
    file = tmp_path / "bad.py"
    file.write_text(source)
    with pytest.raises(InputError, match=says):
        kernelbench.load(file, timeout_s=4.0 if says == "did not finish" else 20.0)
