"""Fixtures of clusters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def short_path() -> Iterator[Path]:
    """A new folder; sockets have a short limit for their paths."""
    with tempfile.TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
