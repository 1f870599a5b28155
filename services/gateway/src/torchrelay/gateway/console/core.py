"""The nouns of the console's live figures. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Listed(NamedTuple):
    """A model of the catalog."""

    name: str  # "tenant/model"
    tenant_id: str
    version_id: str
    pack_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that holds now. It is shown once it has held for ``hold_s``."""

    key: str  # tells whether it is the same as a moment ago
    text: str
    advice: str
    is_critical: bool = False
    hold_s: float = 0.0
    models: tuple[str, ...] = ()  # that it is about
    public: str = ""  # the text for tenants, if it is about a model of theirs or about none; empty: not shown to them
