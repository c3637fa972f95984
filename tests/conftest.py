"""Fixtures shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.models import materialise
from profiles.workload import ModelSpec, TrafficSpec, Workload


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with 2.8 million parameters and a tokenizer of 2048 tokens; read only."""
    return materialise(ModelSpec(source="random-llama"), tmp_path_factory.mktemp("models"))


@pytest.fixture
def tiny_workload() -> Workload:
    """float32, one batch of four, 16 tokens in and 8 out."""
    return Workload(
        name="tiny",
        model=ModelSpec(source="random-llama", dtype="float32"),
        traffic=TrafficSpec(input_tokens=16, output_tokens=8, concurrency=4, requests=4),
    )
