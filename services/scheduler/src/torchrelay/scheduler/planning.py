"""Relay planning: which host follows which.

A chain costs every host one incoming and at most one outgoing copy, so n hosts fill in little more time than one (each
forwards chunks while it still receives). Holders that feed nobody yet are taken first; a host that is itself still
receiving is as good a source as a complete one, because chunks come in the order in which everybody wants them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrelay.scheduler.core import REMOTE, Store

MAX_ALTERNATES = 4  # besides the first source and the remote store


@dataclass(frozen=True)
class Arrow:
    """One host's incoming copy: ``sources`` best first, the others for repair, the remote store last."""

    target: str
    sources: tuple[str, ...]
    already_there: bool = False  # or on its way: nothing new will flow

    @property
    def upstream(self) -> str:
        return self.sources[0]


@dataclass(frozen=True)
class RunningRelay:
    """An arrow whose bytes are still flowing."""

    pack_id: str
    target: str
    upstream: str
    started_at: float


def plan(
    whole: Sequence[str], filling: Sequence[str], targets: Sequence[str], outgoing: Mapping[str, int]
) -> tuple[Arrow, ...]:
    """Arrows for one pack, in the order in which they are to be started.

    ``whole``: stores that have all of it. ``filling``: stores that are receiving it, oldest first. ``targets``:
    stores that need it, in the order wanted. ``outgoing``: copies each store sends now, of any pack.

    Sources of a target only ever are whole, or began before it: whatever repair does, copies cannot run in a circle.
    """
    load = Counter(outgoing)
    began: list[str] = list(filling)
    arrows: list[Arrow] = []
    for target in dict.fromkeys(targets):
        if target in whole or target in began:
            before = began[: began.index(target)] if target in began else []
            candidates = [store for store in (*whole, *before) if store != target]
            arrows.append(Arrow(target, (*candidates[: 1 + MAX_ALTERNATES], REMOTE), already_there=True))
            continue
        sources = _ranked(whole, began, load)
        arrows.append(Arrow(target, (*sources[: 1 + MAX_ALTERNATES], REMOTE)))
        if sources:
            load[sources[0]] += 1
        began.append(target)
    return tuple(arrows)


def _ranked(whole: Sequence[str], began: Sequence[str], load: Mapping[str, int]) -> list[str]:
    """The first source feeds fewest; at a tie a complete holder, then the end of the chain. Alternates: complete ones
    first.
    """
    candidates = [*whole, *reversed(began)]
    if not candidates:
        return []
    first = min(candidates, key=lambda store: load.get(store, 0))
    return [first, *(store for store in candidates if store != first)]


class Relays:
    """Arrows started and not ended yet; with the stores' reports they make the holder directory."""

    _UNSEEN_S = 10.0  # an arrow whose target never reports the pack is dropped after this time

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RunningRelay] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, pack_id: str, arrows: Iterable[Arrow], now: float) -> None:
        for arrow in arrows:
            if not arrow.already_there:
                self._running[(pack_id, arrow.target)] = RunningRelay(pack_id, arrow.target, arrow.upstream, now)

    def drop(self, pack_id: str, target: str) -> None:
        """The relay could not be started, or its store is gone."""
        self._running.pop((pack_id, target), None)

    def observe(self, store: Store, now: float) -> None:
        """Ends the arrows into ``store`` that its report shows as ended."""
        for key, relay in list(self._running.items()):
            if relay.target != store.store_id:
                continue
            copy = store.copies.get(relay.pack_id)
            unseen = copy is None and now - relay.started_at > self._UNSEEN_S
            if unseen or (copy is not None and not copy.receiving):
                del self._running[key]

    def lose(self, store_id: str) -> None:
        for key in [key for key in self._running if key[1] == store_id]:
            del self._running[key]

    def outgoing(self) -> Counter[str]:
        """Copies each store sends now."""
        return Counter(relay.upstream for relay in self._running.values())

    def filling(self, pack_id: str, stores: Iterable[Store]) -> tuple[str, ...]:
        """Stores that are receiving the pack, by arrows and by reports, oldest first."""
        begun = {
            store.store_id: copy.relay_begin_us / 1e6
            for store in stores
            if (copy := store.copies.get(pack_id)) and copy.receiving
        }
        begun |= {relay.target: relay.started_at for relay in self._running.values() if relay.pack_id == pack_id}
        return tuple(sorted(begun, key=lambda store_id: (begun[store_id], store_id)))


def whole_holders(pack_id: str, stores: Iterable[Store]) -> tuple[str, ...]:
    """Stores that have all of the pack."""
    return tuple(store.store_id for store in stores if pack_id in store.copies and store.copies[pack_id].complete)
