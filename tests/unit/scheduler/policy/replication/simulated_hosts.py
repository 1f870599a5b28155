"""Simulated hosts for the replicator: arenas that evict as real ones do, transfers at the speed of their links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.types import REMOTE, PackCopy, StoreStatus

GB = 1 << 30
CHUNKS = 256
LINK_BYTES_PER_S = 3e9  # of a host, each direction
REMOTE_BYTES_PER_S = 5e8  # of each copy that comes from the remote store


@dataclass
class Held:
    """A pack in a host's arena."""

    num_bytes: int
    last_used: float
    have: float = 0.0  # bytes that have arrived
    sources: tuple[str, ...] = ()
    pinned_until: float = 0.0

    @property
    def whole(self) -> bool:
        return self.have >= self.num_bytes


@dataclass
class Host:
    store_id: str
    domain: str
    arena_bytes: int
    run: int = 1
    up: bool = True
    held: dict[str, Held] = field(default_factory=dict)
    retained_packs: tuple[str, ...] = ()
    _report: StoreStatus | None = None

    def touch(self) -> None:
        """Something to be reported has changed."""
        self._report = None

    def reserve(
        self, pack_id: str, num_bytes: int, sources: Sequence[str], now: float, keep_retained: bool, pin_s: float = 0.0
    ) -> bool:
        """Takes a copy in, as the arena does: evicting the longest unused, the retained last or not at all."""
        ranks = {retained: rank for rank, retained in enumerate(self.retained_packs)}

        def order(pack: str) -> tuple[bool, float]:
            return (True, ranks[pack]) if pack in ranks else (False, self.held[pack].last_used)

        leaving = [pack for pack, held in self.held.items() if held.whole and held.pinned_until <= now]
        leaving = sorted((pack for pack in leaving if not (keep_retained and pack in ranks)), key=order)
        used = sum(held.num_bytes for held in self.held.values())
        if used - sum(self.held[pack].num_bytes for pack in leaving) + num_bytes > self.arena_bytes:
            return False
        while used + num_bytes > self.arena_bytes:
            used -= self.held.pop(leaving.pop(0)).num_bytes
        self.held[pack_id] = Held(num_bytes, now, sources=tuple(sources), pinned_until=now + pin_s)
        self.touch()
        return True

    def report(self, now: float) -> StoreStatus:
        if self._report is None:
            copies = {}
            for pack_id, held in self.held.items():
                verified = CHUNKS if held.whole else int(held.have / held.num_bytes * CHUNKS)
                pins = int(not held.whole or held.pinned_until > now)
                copies[pack_id] = PackCopy(
                    pack_id, held.num_bytes, CHUNKS, verified, pins, retained=pack_id in self.retained_packs
                )
            name = self.store_id
            run = f"{name} run {self.run}"
            self._report = StoreStatus(name, run, name, "", "", now, self.arena_bytes, copies, self.domain)
        return self._report


def transfer(hosts: Mapping[str, Host], step_s: float) -> None:
    """Bytes flow for ``step_s``: links are shared evenly. A copy that lost its source goes on with the next one."""
    flows: list[tuple[Host, Held, str]] = []
    for host in hosts.values():
        for pack_id, held in host.held.items():
            if host.up and not held.whole:
                flows.append((host, held, _source_of(hosts, pack_id, held, host)))
    into = Counter(host.store_id for host, _, _ in flows)
    out = Counter(source for _, _, source in flows)
    for host, held, source in flows:
        rate = REMOTE_BYTES_PER_S if source == REMOTE else LINK_BYTES_PER_S / out[source]
        held.have += step_s * min(rate, LINK_BYTES_PER_S / into[host.store_id])
        host.touch()


def _source_of(hosts: Mapping[str, Host], pack_id: str, held: Held, target: Host) -> str:
    for source in held.sources:
        if source == REMOTE:
            return REMOTE
        other = hosts[source].held.get(pack_id)
        if hosts[source].up and other is not None and hosts[source] is not target and other.have > held.have:
            return source
    return REMOTE
