"""The refusal of a config.json."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """The config requires something this version cannot run; ``field`` is the key in config.json."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field
