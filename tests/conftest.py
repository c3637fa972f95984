"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from profiles.models import materialise
from profiles.reference import Reference
from profiles.workload import ModelSpec, TrafficSpec, Workload
from tests.scripted_engine import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with 2.8 million parameters and a tokenizer of 2048 tokens; read only."""
    return materialise(ModelSpec(source="random-llama"), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_workload() -> Workload:
    """float32, one batch of four, 16 tokens in and 8 out."""
    return Workload(
        name="tiny",
        model=ModelSpec(source="random-llama", dtype="float32"),
        traffic=TrafficSpec(input_tokens=16, output_tokens=8, concurrency=4, requests=4),
    )


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """The model that `ScriptedEngine` serves, and its log-probabilities [last token, next token]; read only."""
    folder = tmp_path_factory.mktemp("scripted")
    return folder, make_model(folder)


@pytest.fixture(scope="session")
def scripted_reference(
    scripted_model: tuple[Path, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """The clean reference of that model, running (it sleeps between questions). No test may break it."""
    folder = tmp_path_factory.mktemp("reference")
    with Reference(scripted_model[0], children=folder, log=folder / "log", threads=1) as running:
        yield running
