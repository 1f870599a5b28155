"""The names of models in metrics."""

from __future__ import annotations

from typing import Final

MAX_MODELS: Final = 2000  # with series of their own
OTHER: Final = "other"


class ModelLabels:
    """The models that have series of their own; further ones share those of ``OTHER``, since names cost nothing."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def of(self, name: str) -> str:
        """The label of a model."""
        if name not in self._names and len(self._names) >= MAX_MODELS:
            return OTHER
        self._names.add(name)
        return name
