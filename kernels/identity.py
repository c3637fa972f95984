"""Content hashes: what makes two things the same thing."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, UTF-8, no NaN.

    Raises:
        ValueError: the value holds NaN or an infinity, which JSON does not have.
        TypeError: the value holds something that is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """SHA-256 of `canonical_json(value)`, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
