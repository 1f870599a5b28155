"""The capacity and the present traffic of each host's link, per direction, learned from reports.

Capacity is the highest rate that any link of the cluster reached, because a slower transfer may be the other end's
fault. That peak fades with a half-life of minutes in which transfers are measured, so idle links do not seem slower. A
direction that no transfer has used counts twice the peak, so that it is tried. The link speed that the host reports is
an upper limit, and so is a setting. Transfers from the remote store do not count, because it may be a folder of the
host. After a transfer fell short of its plan, the rate that it reached is the capacity for a while, and for longer each
time that this happens again when the link is next tried with more.

Background traffic is the larger of the KV that workers report and the traffic in the host's network counters that is
not from relays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from torchrelay.scheduler.policy.relay.planning import DEFAULT_BYTES_PER_S, Node
from torchrelay.scheduler.policy.relay.transfers import Transfer
from torchrelay.scheduler.policy.types import REMOTE, PackCopy, StoreStatus, WorkerStatus

_SMOOTHING_S = 1.0
_SILENT_S = 3.0
_MIN_INTERVAL_S = 0.05  # reports closer together than this are merged
_HALF_LIFE_S = 300.0  # of a link's peak rate
_FORGET_S = 900.0  # a host without a store is forgotten if its workers have been silent for this time
_CEILING_S = 30.0  # how long a link counts as slow after a transfer fell short on it; each time twice as long
_MAX_CEILING_S = 960.0
_MIN_TRANSFER_S = 0.05  # a shorter transfer says little about the link
_UNMEASURED_FACTOR = 2.0  # at most the factor by which a transfer may miss its plan
_BUSY_SHARE = 0.05  # of the capacity: background below this is noise
_FASTER = 1.25  # times the rate at which a link fell short: it is faster than that

_Rates = defaultdict[str, list[float]]  # of transfers, by host


@dataclass
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


@dataclass(eq=False)
class LinkDirection:
    """A direction of a host's link."""

    speed: float = 0.0  # of the interfaces; 0: unknown
    all_traffic: RateMeter = field(default_factory=RateMeter)  # stays at 0 where the host has no counters
    relayed: RateMeter = field(default_factory=RateMeter)
    kv: dict[str, RateMeter] = field(default_factory=dict)  # by worker
    _peak: float = 0.0
    _peak_at_s: float = 0.0
    _ceiling: float = math.inf
    _ceiling_until: float = 0.0
    _ceiling_s: float = 0.0

    def background(self, now: float) -> float:
        kv = sum([meter.bytes_per_s(now) for meter in self.kv.values()])
        return max(kv, self.all_traffic.bytes_per_s(now) - self.relayed.bytes_per_s(now), 0.0)

    def observe_kv(self, worker_id: str, value: int, now: float) -> None:
        self.kv = {known: meter for known, meter in self.kv.items() if known == worker_id or not meter.is_silent(now)}
        self.kv.setdefault(worker_id, RateMeter()).observe(value, now)

    def reached(self, bytes_per_s: float, measured_s: float) -> None:
        """Notes a rate that a transfer reached. ``measured_s``: how long transfers have been measured, anywhere."""
        if bytes_per_s >= self.peak(measured_s):
            self._peak, self._peak_at_s = bytes_per_s, measured_s
        if bytes_per_s > self._ceiling * _FASTER:
            self._ceiling, self._ceiling_s = math.inf, 0.0

    def peak(self, measured_s: float) -> float:
        if not self._peak:
            return 0.0
        return float(self._peak * 0.5 ** ((measured_s - self._peak_at_s) / _HALF_LIFE_S))

    def fell_short(self, bytes_per_s: float, now: float) -> None:
        """Records that a transfer fell short of its plan while the direction carried ``bytes_per_s``."""
        if now >= self._ceiling_until:  # it was tried again
            is_again = now < self._ceiling_until + _MAX_CEILING_S
            self._ceiling_s = min(max(2 * self._ceiling_s, _CEILING_S), _MAX_CEILING_S) if is_again else _CEILING_S
        self._ceiling, self._ceiling_until = bytes_per_s, now + self._ceiling_s

    def capacity(self, best: float, now: float) -> float:
        """Capacity of the direction. ``best``: the peak of the best link in the cluster; 0 without a measurement."""
        expected = best if self._peak else best * _UNMEASURED_FACTOR
        capacity = min(expected or math.inf, self.speed or math.inf)
        ceiling = self._ceiling if now < self._ceiling_until else math.inf
        return min(DEFAULT_BYTES_PER_S if math.isinf(capacity) else capacity, ceiling)


@dataclass
class _Link:
    out: LinkDirection = field(default_factory=LinkDirection)
    into: LinkDirection = field(default_factory=LinkDirection)
    reported_at: float = 0.0


class Links:
    """Links by host; the remote store counts as a host."""

    def __init__(self) -> None:
        self._links: defaultdict[str, _Link] = defaultdict(_Link)
        self._host_of: dict[str, str] = {REMOTE: REMOTE}  # by store
        self._incoming: dict[str, dict[str, float]] = {}  # by host: the rate from each source's host
        self._followers: dict[str, dict[str, int]] = {}  # by source's host: hosts, with their places in ``_incoming``
        self._places = count()
        self._place_of: dict[str, int] = {}
        self._best: LinkDirection | None = None  # with the highest peak; all fade alike. None: not known
        self._tidy_at = 0.0
        self._measured_s = self._measured_at = 0.0

    def observe_worker(self, worker: WorkerStatus, now: float) -> None:
        link = self._reporting(worker.host_id, now)
        link.out.observe_kv(worker.worker_id, worker.kv_bytes_sent, now)
        link.into.observe_kv(worker.worker_id, worker.kv_bytes_received, now)

    @property
    def hosts(self) -> frozenset[str]:
        """Hosts with known links."""
        return frozenset(self._links)

    def observe_store(self, store: StoreStatus, before: StoreStatus | None, now: float) -> None:
        """Learns from a store's report. ``before``: the store's previous report, None for its first."""
        self._host_of[store.store_id] = store.host_id
        link, nic = self._reporting(store.host_id, now), store.nic
        link.out.relayed.observe(store.bytes_sent, now)
        link.into.relayed.observe(store.bytes_received, now)
        if nic is not None:
            link.out.speed = link.into.speed = nic.bytes_per_s
            link.out.all_traffic.observe(nic.bytes_sent, now)
            link.into.all_traffic.observe(nic.bytes_received, now)
        self._learn(store, before, now)

    def _reporting(self, host_id: str, now: float) -> _Link:
        """The link of a host that reports. Now and then, hosts that have long been silent are forgotten."""
        if now >= self._tidy_at:
            self._tidy_at = now + _FORGET_S
            silent = {known for known, link in self._links.items() if now - link.reported_at > _FORGET_S}
            for known in silent.difference(self._host_of.values()):
                self._forget(known)
        link = self._links[host_id]
        link.reported_at = now
        return link

    def _learn(self, store: StoreStatus, before: StoreStatus | None, now: float) -> None:
        """Learns from the store's copies about the links they came over: its own and those of their sources."""
        incoming: defaultdict[str, float] = defaultdict(float)
        for copy in store.copies.values():
            for share in copy.shares:
                if share.following and share.bytes_per_s and share.holder_id in self._host_of:
                    incoming[self._host_of[share.holder_id]] += share.bytes_per_s
            if _has_just_ended(copy, before) and (rate := _mean_bytes_per_s(copy)):
                if copy.source != REMOTE:
                    self._reached(self._links[store.host_id].into, rate)
                if copy.source in self._host_of and not copy.shares:
                    self._sender_reached(self._host_of[copy.source], rate)
        self._set_incoming(store.host_id, dict(incoming))
        if incoming:
            self._measured_s += min(max(now - self._measured_at, 0.0), _SMOOTHING_S)
            self._measured_at = now
        if from_peers := sum(rate for host_id, rate in incoming.items() if host_id != REMOTE):
            self._reached(self._links[store.host_id].into, from_peers)
        for host_id in incoming:
            self._sender_reached(host_id, self._sent_by(host_id))

    def _sender_reached(self, host_id: str, bytes_per_s: float) -> None:
        if host_id == REMOTE:  # it says nothing of links
            self._links[REMOTE].out.reached(bytes_per_s, self._measured_s)
        else:
            self._reached(self._links[host_id].out, bytes_per_s)

    def _reached(self, direction: LinkDirection, bytes_per_s: float) -> None:
        direction.reached(bytes_per_s, self._measured_s)
        if self._best is not None and direction.peak(self._measured_s) > self._best.peak(self._measured_s):
            self._best = direction

    @property
    def _best_peak(self) -> float:
        """The highest peak among the cluster's links."""
        if self._best is None:
            hosts = (link for host_id, link in self._links.items() if host_id != REMOTE)
            directions = (direction for link in hosts for direction in (link.out, link.into))
            self._best = max(directions, key=lambda direction: direction.peak(self._measured_s), default=None)
        return self._best.peak(self._measured_s) if self._best is not None else 0.0

    def _set_incoming(self, host_id: str, rates: dict[str, float]) -> None:
        before = self._incoming.get(host_id)
        if before is None:
            self._place_of[host_id] = next(self._places)
        self._incoming[host_id] = rates
        for source in rates:
            self._followers.setdefault(source, {})[host_id] = self._place_of[host_id]
        for source in before or ():
            if source not in rates:
                self._unfollow(source, host_id)

    def _unfollow(self, source: str, host_id: str) -> None:
        del self._followers[source][host_id]
        if not self._followers[source]:
            del self._followers[source]

    def _sent_by(self, host_id: str) -> float:
        """The rate that all followers of the host get from it now."""
        followers = self._followers.get(host_id, {})
        return sum(self._incoming[follower][host_id] for follower in sorted(followers, key=followers.__getitem__))

    def forget_store(self, store: StoreStatus) -> None:
        self._host_of.pop(store.store_id, None)
        for source in self._incoming.pop(store.host_id, ()):
            self._unfollow(source, store.host_id)
        self._forget(store.host_id)

    def _forget(self, host_id: str) -> None:
        link = self._links.pop(host_id, None)
        if link is not None and (self._best is link.out or self._best is link.into):
            self._best = None

    def fell_short(self, source: str, now: float) -> None:
        """Notes that a transfer gets far less from the source than planned: the source sends all that it can."""
        if host_id := self._host_of.get(source):
            self._links[host_id].out.fell_short(self._sent_by(host_id), now)

    def took_less(self, store: StoreStatus, now: float) -> None:
        """Notes that another source did not help: the store takes in all that it can."""
        self._links[store.host_id].into.fell_short(sum(self._incoming.get(store.host_id, {}).values()), now)

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
        sending = {self._host_of.get(source, source) for transfer in yielding for source in transfer.holder_ids}
        best, out, into = self._best_peak, _Rates(list), _Rates(list)
        for transfer in running:
            into[self._host_of.get(transfer.target, transfer.target)].append(transfer.planned_bytes_per_s)
            for source, rate in transfer.sources:
                out[self._host_of.get(source, source)].append(rate)
        remote = self._links[REMOTE].out.peak(self._measured_s) if REMOTE in self._links else 0.0
        nodes = {REMOTE: self._node(REMOTE, "", max(best, remote), out, into, REMOTE in sending, now)}
        for store in stores:
            leaf = store.failure_domain if store.failure_domain != store.host_id else ""
            nodes[store.store_id] = self._node(store.host_id, leaf, best, out, into, store.host_id in sending, now)
        return nodes

    @property
    def usual_bytes_per_s(self) -> float:
        """The expected rate of a link that nothing else uses."""
        return self._best_peak or DEFAULT_BYTES_PER_S

    def _node(
        self, host_id: str, leaf: str, best: float, out: _Rates, into: _Rates, is_sending: bool, now: float
    ) -> Node:
        link = self._links.get(host_id) or _Link()
        capacity_out, background_out = link.out.capacity(best, now), link.out.background(now)
        return Node(
            residual_out=_residual_bytes_per_s(capacity_out, background_out, out[host_id]),
            residual_in=_residual_bytes_per_s(link.into.capacity(best, now), link.into.background(now), into[host_id]),
            host=host_id,
            busy_out=is_sending or bool(out[host_id]) or background_out > _BUSY_SHARE * capacity_out,
            leaf=leaf,
        )


def _residual_bytes_per_s(capacity: float, background: float, transfers: list[float]) -> float:
    """The rate left for one more transfer: KV comes first, and transfers share the rest."""
    free = max(capacity - background, 0.0)
    return max(free - sum(transfers), free / (1 + len(transfers)))


def _has_just_ended(copy: PackCopy, before: StoreStatus | None) -> bool:
    """Whether this report is the first with the end of the copy's relay; the stamp itself is by another clock."""
    known = before.copies.get(copy.pack_id) if before else None
    return before is not None and copy.relay_end_us not in (0, known.relay_end_us if known else 0)


def _mean_bytes_per_s(copy: PackCopy) -> float:
    """Mean rate over the whole relay; 0 if it has not ended or was too short."""
    took_s = (copy.relay_end_us - copy.relay_first_us) / 1e6
    is_measured = copy.complete and copy.source and took_s >= _MIN_TRANSFER_S
    return copy.pack_bytes / took_s if is_measured else 0.0
