"""Phases of an explained request."""

from __future__ import annotations

from typing import Any


def phase(name: str, begin_ms: int, end_ms: int) -> dict[str, Any]:
    return {"name": name, "begin_unix_us": begin_ms * 1000, "end_unix_us": end_ms * 1000}
