"""Versions that decide what a number means."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kernels.ruler


def ruler_version() -> str:
    """Hash of the ruler's own sources: figures of other rulers are not compared with its."""
    folder = Path(kernels.ruler.__path__[0])
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.*")):
        if file.suffix in (".py", ".c", ".h"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Of this package, its ruler, what it measures with, and the system."""
    found = {"roofloop": _of("roofloop"), "ruler": ruler_version(), "python": platform.python_version()}
    found |= {name: _of(name) for name in ("torch", "transformers", "prefect", "duckdb", "optuna")}
    return found | {"system": platform.platform()}


def _of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
