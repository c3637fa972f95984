"""The base of every record: frozen, no unknown keys, finite numbers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from kernels.identity import content_hash


class Record(BaseModel):
    """A frozen pydantic record whose identity is its content."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def content_hash(self) -> str:
        """SHA-256 over the record as canonical JSON."""
        return content_hash(self.model_dump(mode="json"))
