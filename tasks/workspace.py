"""Where things lie: one folder that holds the runs, the knowledge base and the state of Roofloop."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kernels.errors import InputError


def _default_models() -> Path:
    return Path.home() / ".cache" / "roofloop" / "models"


@dataclass(frozen=True)
class Workspace:
    """Paths of one workspace. Nothing is created before `create` is called."""

    root: Path = field(default_factory=Path.cwd)
    """Absolute after `create`; the folder that the person works in."""
    models: Path = field(default_factory=_default_models)
    """Materialised models, shared by all workspaces of this person."""

    @property
    def state(self) -> Path:
        """What Roofloop needs to remember."""
        return self.root / ".roofloop"

    @property
    def runs(self) -> Path:
        """One folder per run: what a person reads."""
        return self.root / "runs"

    @property
    def prefect(self) -> Path:
        """PREFECT_HOME. Mode 0700: a result file in it could make its reader execute code."""
        return self.state / "prefect"

    @property
    def kb(self) -> Path:
        """The knowledge base: immutable record files and the DuckDB built from them."""
        return self.state / "kb"

    @property
    def builds(self) -> Path:
        """Content-addressed build products of candidates."""
        return self.state / "builds"

    @property
    def targets(self) -> Path:
        """Measured ceilings, one file per hardware fingerprint."""
        return self.state / "targets"

    @property
    def leases(self) -> Path:
        """One lock file per device."""
        return self.state / "leases"

    @property
    def children(self) -> Path:
        """Pid files of child processes, so that orphans of a killed run are found."""
        return self.state / "children"

    @property
    def logs(self) -> Path:
        """One log file per command."""
        return self.state / "logs"

    def create(self) -> Workspace:
        """Make the folders (existing ones stay) and return the workspace with absolute paths.

        Raises:
            InputError: a folder cannot be made or is not writable.
        """
        made = Workspace(self.root.expanduser().resolve(), self.models.expanduser().resolve())
        folders = (made.runs, made.kb, made.builds, made.targets, made.leases, made.children, made.logs, made.models)
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            made.state.chmod(0o700)
            made.prefect.mkdir(mode=0o700, exist_ok=True)
            made.prefect.chmod(0o700)
        except OSError as error:
            raise InputError(
                f"this folder cannot hold a workspace: {error.strerror or error}.",
                file=error.filename or made.root,
                key="--workspace",
                remedy="Name a folder that you may write to with --workspace.",
            ) from error
        for folder in (made.runs, made.state):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise InputError(
                    "this folder is not writable.",
                    file=folder,
                    key="--workspace",
                    remedy="Make it writable or name another folder with --workspace.",
                )
        return made
