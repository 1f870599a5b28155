"""The refusal of a config.json."""

from __future__ import annotations

import json
from typing import Any, Final

_MAX_SHOWN_CHARS: Final = 80


class UnsupportedModel(ValueError):
    """The config requires something this version cannot run; ``field`` is the key in config.json."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def shown(value: Any) -> str:
    """A value of a config.json in a message: a text in quotes, others as JSON spells them."""
    return (repr(value) if isinstance(value, str) else json.dumps(value))[:_MAX_SHOWN_CHARS]
