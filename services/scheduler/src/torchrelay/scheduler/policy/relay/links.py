"""The capacity and the present traffic of each host's link, per direction, learned from reports.

Capacity is the highest rate that any link of the cluster reached, because a slower transfer may be the other end's
fault. That peak fades with a half-life of minutes in which transfers are measured, so idle links do not seem slower. A
direction that no transfer has used counts twice the peak, so that it is tried. The link speed that the host reports is
an upper limit. Transfers from the remote store do not count, because it may be a folder of the host. After a transfer
fell short of its plan, the rate that it reached is the capacity for a while, and for longer each time that this happens
again when the link is next tried with more.

Background traffic is the larger of the KV that workers report and the traffic in the host's network counters that is
not from relays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.relay.planning import DEFAULT_BYTES_PER_S, Node
from torchrelay.scheduler.policy.relay.transfers import Transfer
from torchrelay.scheduler.policy.types import REMOTE, StoreStatus, WorkerStatus

_SMOOTHING_S = 1.0
_SILENT_S = 3.0
_MIN_INTERVAL_S = 0.05  # reports closer together than this are merged
_HALF_LIFE_S = 300.0  # of the peak rate
_CEILING_S = 30.0  # how long a link counts as slow after a transfer fell short on it; each time twice as long
_MAX_CEILING_S = 960.0
_MIN_TRANSFER_S = 0.05  # a shorter transfer says little about the link
_UNMEASURED_FACTOR = 2.0  # at most the factor by which a transfer may miss its plan
_BUSY_SHARE = 0.05  # of the capacity: background below this is noise
_FASTER = 1.25  # times the rate at which a link fell short: it is faster than that


@dataclass(slots=True)
class RateMeter:
    """The smoothed rate of a rising byte counter; 0 after a while without observations."""

    _rate: float = 0.0
    _value: int = 0
    _at: float = 0.0

    def bytes_per_s(self, now: float) -> float:
        return 0.0 if self.is_silent(now) else self._rate

    def is_silent(self, now: float) -> bool:
        return now - self._at > _SILENT_S

    def observe(self, value: int, now: float) -> None:
        since = now - self._at
        if not self._at or value < self._value:  # first value, or the counter was reset
            self._value, self._at = value, now
        elif since >= _MIN_INTERVAL_S:
            weight = 1 - math.exp(-since / _SMOOTHING_S)
            self._rate += weight * ((value - self._value) / since - self._rate)
            self._value, self._at = value, now


@dataclass(slots=True)
class _Peak:
    """The highest rate that transfers reached. ``measured_s``: how long transfers have been measured."""

    _bytes_per_s: float = 0.0
    _at_s: float = 0.0

    def bytes_per_s(self, measured_s: float) -> float:
        return self._bytes_per_s * math.exp2((self._at_s - measured_s) / _HALF_LIFE_S)

    def reached(self, bytes_per_s: float, measured_s: float) -> None:
        if bytes_per_s >= self.bytes_per_s(measured_s):
            self._bytes_per_s, self._at_s = bytes_per_s, measured_s


@dataclass(slots=True)
class _Direction:
    """A direction of a host's link."""

    speed: float = 0.0  # of the interfaces; 0: unknown
    all_traffic: RateMeter = field(default_factory=RateMeter)  # stays at 0 where the host has no counters
    relayed: RateMeter = field(default_factory=RateMeter)
    kv: dict[str, RateMeter] = field(default_factory=dict)  # by worker
    is_measured: bool = False  # a transfer has used it
    _ceiling: float = math.inf
    _ceiling_until: float = 0.0
    _ceiling_s: float = 0.0

    def background(self, now: float) -> float:
        kv = sum(meter.bytes_per_s(now) for meter in self.kv.values())
        return max(kv, self.all_traffic.bytes_per_s(now) - self.relayed.bytes_per_s(now), 0.0)

    def observe_kv(self, worker_id: str, value: int, now: float) -> None:
        self.kv = {known: meter for known, meter in self.kv.items() if known == worker_id or not meter.is_silent(now)}
        self.kv.setdefault(worker_id, RateMeter()).observe(value, now)

    def reached(self, bytes_per_s: float) -> None:
        self.is_measured = True
        if bytes_per_s > self._ceiling * _FASTER:
            self._ceiling, self._ceiling_s = math.inf, 0.0

    def fell_short(self, bytes_per_s: float, now: float) -> None:
        """Records that a transfer fell short of its plan while the direction carried ``bytes_per_s``."""
        if now >= self._ceiling_until:  # it was tried again
            is_again = now < self._ceiling_until + _MAX_CEILING_S
            self._ceiling_s = min(max(2 * self._ceiling_s, _CEILING_S), _MAX_CEILING_S) if is_again else _CEILING_S
        self._ceiling, self._ceiling_until = bytes_per_s, now + self._ceiling_s

    def capacity(self, peak: float, now: float) -> float:
        """Capacity of the direction. ``peak``: of the cluster; 0 without a measurement."""
        expected = peak if self.is_measured else peak * _UNMEASURED_FACTOR
        capacity = min(expected or math.inf, self.speed or math.inf)
        ceiling = self._ceiling if now < self._ceiling_until else math.inf
        return min(DEFAULT_BYTES_PER_S if math.isinf(capacity) else capacity, ceiling)

    def is_busy(self, peak: float, now: float) -> bool:
        return self.background(now) > _BUSY_SHARE * self.capacity(peak, now)

    def residual(self, peak: float, transfers: list[float], now: float) -> float:
        """The rate left for one more transfer: KV comes first, and transfers share the rest."""
        free = max(self.capacity(peak, now) - self.background(now), 0.0)
        return max(free - sum(transfers), free / (1 + len(transfers)))


@dataclass(slots=True)
class _Link:
    out: _Direction = field(default_factory=_Direction)
    into: _Direction = field(default_factory=_Direction)


class Links:
    """Links of hosts with a store; the remote store counts as a host."""

    def __init__(self) -> None:
        self._links = {REMOTE: _Link()}  # by host
        self._host_of = {REMOTE: REMOTE}  # by store
        self._incoming: dict[str, dict[str, float]] = {}  # by store: the rate from each of its sources
        self._peak, self._remote_peak = _Peak(), _Peak()
        self._measured_s = self._measured_at = 0.0

    def observe_worker(self, worker: WorkerStatus, now: float) -> None:
        if link := self._links.get(worker.host_id):
            link.out.observe_kv(worker.worker_id, worker.kv_bytes_sent, now)
            link.into.observe_kv(worker.worker_id, worker.kv_bytes_received, now)

    def observe_store(self, store: StoreStatus, finished: Iterable[Transfer], now: float) -> None:
        """Learns from a store's report. ``finished``: transfers that have finished since the store's last report."""
        self._host_of[store.store_id] = store.host_id
        link, nic = self._links.setdefault(store.host_id, _Link()), store.nic
        link.out.relayed.observe(store.bytes_sent, now)
        link.into.relayed.observe(store.bytes_received, now)
        if nic is not None:
            link.out.speed = link.into.speed = nic.bytes_per_s
            link.out.all_traffic.observe(nic.bytes_sent, now)
            link.into.all_traffic.observe(nic.bytes_received, now)
        for transfer in finished:
            self._learn_mean(transfer, link)
        self._incoming[store.store_id] = incoming = defaultdict[str, float](float)
        for share in (share for copy in store.copies.values() for share in copy.shares):
            if share.following and share.bytes_per_s and share.holder_id in self._host_of:
                incoming[share.holder_id] += share.bytes_per_s
        if incoming:
            self._measured_s += min(max(now - self._measured_at, 0.0), _SMOOTHING_S)
            self._measured_at = now
        if from_peers := sum(rate for source, rate in incoming.items() if source != REMOTE):
            self._reached(link.into, self._peak, from_peers)
        for source in incoming:
            self._sender_reached(source, self._sent_by(source))

    def _learn_mean(self, transfer: Transfer, link: _Link) -> None:
        """Learns from the mean rate over the whole relay, unless it was too short. ``link``: of the target."""
        copy = transfer.copy
        took_s = (copy.relay_end_us - copy.relay_first_us) / 1e6 if copy is not None else 0.0
        if copy is None or not copy.source or took_s < _MIN_TRANSFER_S:
            return
        if copy.source != REMOTE:
            self._reached(link.into, self._peak, copy.pack_bytes / took_s)
        if not copy.shares:
            self._sender_reached(copy.source, copy.pack_bytes / took_s)

    def _sender_reached(self, source: str, bytes_per_s: float) -> None:
        if link := self._link_of(source):
            peak = self._remote_peak if source == REMOTE else self._peak  # the remote store says nothing of links
            self._reached(link.out, peak, bytes_per_s)

    def _reached(self, direction: _Direction, peak: _Peak, bytes_per_s: float) -> None:
        peak.reached(bytes_per_s, self._measured_s)
        direction.reached(bytes_per_s)

    def _sent_by(self, source: str) -> float:
        """The rate that all followers of the store get from it now."""
        return sum(rates.get(source, 0.0) for rates in self._incoming.values())

    def _link_of(self, store_id: str) -> _Link | None:
        return self._links.get(self._host_of.get(store_id, ""))

    def forget_store(self, store: StoreStatus) -> None:
        self._host_of.pop(store.store_id, None)
        self._links.pop(store.host_id, None)
        self._incoming.pop(store.store_id, None)

    def fell_short(self, source: str, now: float) -> None:
        """Notes that a transfer gets far less from the source than planned: the source sends all that it can."""
        if link := self._link_of(source):
            link.out.fell_short(self._sent_by(source), now)

    def took_less(self, store: StoreStatus, now: float) -> None:
        """Notes that another source did not help: the store takes in all that it can."""
        if link := self._link_of(store.store_id):
            link.into.fell_short(sum(self._incoming.get(store.store_id, {}).values()), now)

    @property
    def usual_bytes_per_s(self) -> float:
        """The expected rate of a link that nothing else uses."""
        return self._peak.bytes_per_s(self._measured_s) or DEFAULT_BYTES_PER_S

    def nodes(
        self,
        stores: Iterable[StoreStatus],
        running: Iterable[Transfer],
        now: float,
        yielding: Iterable[Transfer] = (),
    ) -> dict[str, Node]:
        """The rates that ``running`` transfers leave on the links of ``stores`` and on the remote store's.

        ``yielding``: transfers that leave the new one as much as it can take.
        """
        sending = {self._host_of.get(source, source) for transfer in yielding for source in transfer.sources}
        out, into = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)  # rates, by host
        for transfer in running:
            into[self._host_of.get(transfer.target, transfer.target)].append(transfer.planned_bytes_per_s)
            for source, rate in transfer.sources.items():
                out[self._host_of.get(source, source)].append(rate)

        def node(host_id: str, leaf: str, peak: float) -> Node:
            link = self._links.get(host_id) or _Link()
            is_busy = host_id in sending or bool(out[host_id]) or link.out.is_busy(peak, now)
            residual_out = link.out.residual(peak, out[host_id], now)
            return Node(residual_out, link.into.residual(peak, into[host_id], now), host_id, is_busy, leaf)

        peak, remote = self._peak.bytes_per_s(self._measured_s), self._remote_peak.bytes_per_s(self._measured_s)
        nodes = {REMOTE: node(REMOTE, "", max(peak, remote))}
        for store in stores:
            leaf = store.failure_domain if store.failure_domain != store.host_id else ""
            nodes[store.store_id] = node(store.host_id, leaf, peak)
        return nodes
