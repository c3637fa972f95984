"""Bring-up: a healthy model matches, a broken one is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiles.engines.base import Promoted, Settings, Stack
from profiles.engines.divergence import first_divergence
from tasks.bringup import bringup, require


def load(folder: Path, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


IDS = torch.tensor([[(13 * i + 5) % 2000 for i in range(24)], [(29 * i + 9) % 2000 for i in range(24)]])


def test_a_healthy_model_runs_and_matches(tiny_workload, tiny_model, tmp_path) -> None:
    bf16 = tiny_workload.model_copy(update={"model": tiny_workload.model.model_copy(update={"dtype": "bfloat16"})})
    report = bringup(bf16, tiny_model, children=tmp_path / "c", builds=tmp_path / "b", log=tmp_path / "log")
    assert report.runs, report.reason
    assert report.matches, report.reason
    assert report.kl_nats is not None
    assert 0 < report.kl_nats < 0.03
    assert report.diverges_at is None
    require(report)
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_divergence_in_a_healthy_model(tiny_model, dtype) -> None:
    assert first_divergence(load(tiny_model, torch.float32), load(tiny_model, dtype), IDS) is None


@pytest.mark.parametrize(
    "place", ["model.layers.0.input_layernorm", "model.layers.3.self_attn.v_proj", "model.norm", "lm_head"]
)
def test_broken_weights_are_named(tiny_model, place) -> None:
    model = load(tiny_model, torch.bfloat16)
    with torch.no_grad():
        model.get_submodule(place).weight.mul_(1.3)
    found = first_divergence(load(tiny_model, torch.float32), model, IDS)
    assert found is not None
    assert found.module == place
    assert 0.2 < found.relative_error < 0.4


def test_a_broken_operator_and_the_earliest_of_two_are_named(tiny_model) -> None:
    model = load(tiny_model, torch.bfloat16)
    model.model.layers[4].mlp.forward = lambda x: x * float("nan")
    found = first_divergence(load(tiny_model, torch.float32), model, IDS)
    assert found is not None
    assert (found.module, found.relative_error) == ("model.layers.4.mlp", float("inf"))
    model.model.layers[2].self_attn.q_proj.forward = lambda x: x[..., :1]
    found = first_divergence(load(tiny_model, torch.float32), model, IDS)
    assert found is not None
    assert found.module == "model.layers.2.self_attn.q_proj"
    assert found.kind == "Linear"


def test_an_engine_that_does_not_start_is_reported(tiny_workload, tiny_model, tmp_path) -> None:
    stack = Stack(Settings(engine="transformers", knobs={"torch_compile": True}))
    report = bringup(
        tiny_workload, tiny_model, children=tmp_path / "c", builds=tmp_path / "b", log=tmp_path / "log", stack=stack
    )
    assert (report.runs, report.matches, report.failure) == (False, False, "refused")


def test_a_wrong_kernel_is_named(tiny_workload, tiny_model, tmp_path) -> None:
    """A promoted RMSNorm that is 4 % off (the overlay's own probe lets that pass) breaks the match and is found."""
    problems = pytest.importorskip("kernels.problems")
    from kernels.ruler.spec import Candidate

    problem = problems.build("rmsnorm", cols=192, dtype="float32", visible=[{"rows": 4}])
    source = (
        "import torch\ndef run(x, w, eps):\n"
        "    return 1.04 * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w)\n"
    )
    wrong = Promoted(problem, Candidate("torch", source, "run"), "v", tuple({"rows": n} for n in range(1, 200)))
    stack = Stack(Settings(engine="transformers", knobs={"threads": 1}), (wrong,))
    report = bringup(
        tiny_workload, tiny_model, children=tmp_path / "c", builds=tmp_path / "b", log=tmp_path / "log", stack=stack
    )
    assert report.runs, report.reason
    assert not report.matches, report.reason
    assert report.diverges_at == "model.layers.0.input_layernorm"
