"""Which packs were used, and when last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cachetools import FIFOCache

from torchrelay.scheduler.policy.core import Model

_MAX_PACKS = 4096


@dataclass(frozen=True)
class PackUse:
    """A pack, by the model that used it last."""

    model: Model
    last_used: float


class RecentPacks:
    """The packs used last; those unused for longest are forgotten first."""

    def __init__(self, max_packs: int = _MAX_PACKS) -> None:
        # Setting a key moves it to the end of the queue and reading does not, so the first in is the longest unused.
        self._uses: FIFOCache[str, PackUse] = FIFOCache(max_packs)

    def __contains__(self, pack_id: str) -> bool:
        return pack_id in self._uses

    def __iter__(self) -> Iterator[PackUse]:
        return iter(self._uses.values())

    def model(self, pack_id: str) -> Model:
        return self._uses[pack_id].model

    def note(self, model: Model, now: float) -> None:
        """The model is used."""
        self._uses[model.pack_id] = PackUse(model, now)

    def forget(self, pack_id: str) -> None:
        """As if it had never been used."""
        self._uses.pop(pack_id, None)
