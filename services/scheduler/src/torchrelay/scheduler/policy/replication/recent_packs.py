"""Which packs were used, and when last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchrelay.scheduler.policy.core import Model

_MAX_PACKS = 4096


@dataclass(frozen=True)
class PackUse:
    """A pack, by the model that used it last."""

    model: Model
    last_used: float


class RecentPacks:
    """The packs used last; the longest unused are forgotten first."""

    def __init__(self) -> None:
        self._uses: dict[str, PackUse] = {}  # by pack, the one used last at the end

    def __contains__(self, pack_id: str) -> bool:
        return pack_id in self._uses

    def __iter__(self) -> Iterator[PackUse]:
        return iter(self._uses.values())

    def model(self, pack_id: str) -> Model:
        return self._uses[pack_id].model

    def forget(self, pack_id: str) -> None:
        """As if it had never been used."""
        self._uses.pop(pack_id, None)

    def note(self, model: Model, now: float) -> str | None:
        """The model is used. Returns the pack that is forgotten, if one is."""
        self._uses.pop(model.pack_id, None)
        self._uses[model.pack_id] = PackUse(model, now)
        if len(self._uses) <= _MAX_PACKS:
            return None
        forgotten = next(iter(self._uses))
        del self._uses[forgotten]
        return forgotten
