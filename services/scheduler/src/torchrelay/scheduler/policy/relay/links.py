"""What each host's link can carry and what it carries now, per direction, learned from reports.

Capacity: what the best link of the cluster was seen to reach (fading, with a half-life of minutes in which relays are
measured: links that idle get no slower), for a slower rate may be the other end's fault; twice that for a direction no
relay has used, so that it is tried; at most the link speed that the host itself tells. What comes from the remote store
says nothing of links: it may be a folder of the host.
Where a relay fell short of its plan, what it reached, for a while. A setting may cap it, none makes it up.
Background: what workers say they moved as KV, or all that the host's network counters show beside relays, whichever is
more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from torchrelay.scheduler.planning import DEFAULT_BYTES_PER_S, Node
from torchrelay.scheduler.policy.core import REMOTE, PackCopy, StoreStatus, WorkerStatus
from torchrelay.scheduler.policy.relay.running_relays import RunningRelay

_SMOOTHING_S = 1.0
_SILENT_S = 3.0
_MIN_INTERVAL_S = 0.05  # reports closer to each other than this are taken together
_HALF_LIFE_S = 300.0  # of what a link was seen to reach
_FORGET_S = 900.0  # after which a host without a store is forgotten, if nothing is heard of its workers
_CEILING_S = 30.0  # how long a link counts as slow after a relay fell short on it
_MIN_RELAY_S = 0.05  # a relay that took less time says little of the link
_UNMEASURED_FACTOR = 2.0  # less than what counts as a departure from a plan
_BUSY_SHARE = 0.05  # of the capacity: background below this is noise


@dataclass
class RateMeter:
    """A rising counter of bytes, as a smoothed rate; nothing after a while of silence."""

    _rate: float = 0.0
    _value: int = 0
    _at: float = 0.0

    def bytes_per_s(self, now: float) -> float:
        return 0.0 if self.is_silent(now) else self._rate

    def is_silent(self, now: float) -> bool:
        return now - self._at > _SILENT_S

    def observe(self, value: int, now: float) -> None:
        since = now - self._at
        if not self._at or value < self._value:  # the first time, or the counter began anew
            self._value, self._at = value, now
        elif since >= _MIN_INTERVAL_S:
            weight = 1 - math.exp(-since / _SMOOTHING_S)
            self._rate += weight * ((value - self._value) / since - self._rate)
            self._value, self._at = value, now


@dataclass
class LinkDirection:
    """One direction of a host's link."""

    speed: float = 0.0  # of the interfaces; 0: not known
    all_traffic: RateMeter = field(default_factory=RateMeter)  # stays at 0 where the host has no counters
    relayed: RateMeter = field(default_factory=RateMeter)
    kv: dict[str, RateMeter] = field(default_factory=dict)  # by worker
    _peak: float = 0.0
    _peak_at_s: float = 0.0
    _ceiling: float = math.inf
    _ceiling_until: float = 0.0

    def background(self, now: float) -> float:
        kv = sum(meter.bytes_per_s(now) for meter in self.kv.values())
        return max(kv, self.all_traffic.bytes_per_s(now) - self.relayed.bytes_per_s(now), 0.0)

    def observe_kv(self, worker_id: str, value: int, now: float) -> None:
        self.kv = {known: meter for known, meter in self.kv.items() if known == worker_id or not meter.is_silent(now)}
        self.kv.setdefault(worker_id, RateMeter()).observe(value, now)

    def reached(self, bytes_per_s: float, measured_s: float) -> None:
        """``measured_s``: for how long relays have been measured, anywhere."""
        if bytes_per_s >= self.peak(measured_s):
            self._peak, self._peak_at_s = bytes_per_s, measured_s

    def peak(self, measured_s: float) -> float:
        return float(self._peak * 0.5 ** ((measured_s - self._peak_at_s) / _HALF_LIFE_S))

    def fell_short(self, bytes_per_s: float, now: float) -> None:
        """A relay fell short of its plan, and this is all that the direction carried."""
        self._ceiling, self._ceiling_until = bytes_per_s, now + _CEILING_S

    def capacity(self, best: float, now: float) -> float:
        """``best``: what the best link of the cluster reached; 0: none has been measured."""
        seen = best if self._peak else best * _UNMEASURED_FACTOR
        capacity = min(seen or math.inf, self.speed or math.inf)
        if math.isinf(capacity):
            capacity = DEFAULT_BYTES_PER_S
        return min(capacity, self._ceiling) if now < self._ceiling_until else capacity


@dataclass
class _Link:
    out: LinkDirection = field(default_factory=LinkDirection)
    into: LinkDirection = field(default_factory=LinkDirection)
    heard_at: float = 0.0


class Links:
    """By host, the remote store being one. ``cap_bytes_per_s``: no direction is planned to carry more; 0: no cap."""

    def __init__(self, cap_bytes_per_s: float = 0.0) -> None:
        self._cap = cap_bytes_per_s or math.inf
        self._links: defaultdict[str, _Link] = defaultdict(_Link)
        self._host_of: dict[str, str] = {REMOTE: REMOTE}  # by store
        self._incoming: dict[str, dict[str, float]] = {}  # by host: what each source's host brings now
        self._tidy_at = 0.0
        self._measured_s = self._measured_at = 0.0

    def observe_worker(self, worker: WorkerStatus, now: float) -> None:
        link = self._heard(worker.host_id, now)
        link.out.observe_kv(worker.worker_id, worker.kv_bytes_sent, now)
        link.into.observe_kv(worker.worker_id, worker.kv_bytes_received, now)

    def observe_store(self, store: StoreStatus, now: float) -> None:
        self._host_of[store.store_id] = store.host_id
        link, nic = self._heard(store.host_id, now), store.nic
        link.out.relayed.observe(store.bytes_sent, now)
        link.into.relayed.observe(store.bytes_received, now)
        if nic is not None:
            link.out.speed = link.into.speed = nic.bytes_per_s
            link.out.all_traffic.observe(nic.bytes_sent, now)
            link.into.all_traffic.observe(nic.bytes_received, now)
        self._learn(store, now)

    def _heard(self, host_id: str, now: float) -> _Link:
        """The link of a host that reports. Now and then, hosts that have been silent for long are forgotten."""
        if now >= self._tidy_at:
            self._tidy_at = now + _FORGET_S
            kept = set(self._host_of.values())
            for known in [known for known, link in self._links.items() if now - link.heard_at > _FORGET_S]:
                if known not in kept:
                    del self._links[known]
        link = self._links[host_id]
        link.heard_at = now
        return link

    def _learn(self, store: StoreStatus, now: float) -> None:
        """What the store's copies tell of the links they came over: their own, and their sources'."""
        incoming: defaultdict[str, float] = defaultdict(float)
        for copy in store.copies.values():
            for share in copy.shares:
                if share.following and share.bytes_per_s and share.holder_id in self._host_of:
                    incoming[self._host_of[share.holder_id]] += share.bytes_per_s
            if (rate := _mean_bytes_per_s(copy)) and now - copy.relay_end_us / 1e6 < _SMOOTHING_S:
                if copy.source != REMOTE:
                    self._links[store.host_id].into.reached(rate, self._measured_s)
                if copy.source in self._host_of and not copy.shares:
                    self._links[self._host_of[copy.source]].out.reached(rate, self._measured_s)
        self._incoming[store.host_id] = dict(incoming)
        if incoming:
            self._measured_s += min(max(now - self._measured_at, 0.0), _SMOOTHING_S)
            self._measured_at = now
        if from_peers := sum(rate for host_id, rate in incoming.items() if host_id != REMOTE):
            self._links[store.host_id].into.reached(from_peers, self._measured_s)
        for host_id in incoming:
            self._links[host_id].out.reached(self._sent_by(host_id), self._measured_s)

    def _sent_by(self, host_id: str) -> float:
        """All that the host's followers get from it now."""
        return sum(rates.get(host_id, 0.0) for rates in self._incoming.values())

    def forget_store(self, store: StoreStatus) -> None:
        self._host_of.pop(store.store_id, None)
        self._incoming.pop(store.host_id, None)
        self._links.pop(store.host_id, None)

    def fell_short(self, source: str, now: float) -> None:
        """A relay gets far less from the source than was planned: all that the source sends is what it can."""
        if host_id := self._host_of.get(source):
            self._links[host_id].out.fell_short(self._sent_by(host_id), now)

    def took_less(self, store: StoreStatus, now: float) -> None:
        """Another source made it no faster: what the store takes in is what it can."""
        self._links[store.host_id].into.fell_short(sum(self._incoming.get(store.host_id, {}).values()), now)

    def nodes(self, stores: list[StoreStatus], running: list[RunningRelay], now: float) -> dict[str, Node]:
        """What each store, and the remote store, has left beside what runs now."""
        hosts = (link for host_id, link in self._links.items() if host_id != REMOTE)
        best = max((way.peak(self._measured_s) for link in hosts for way in (link.out, link.into)), default=0.0)
        out: defaultdict[str, list[float]] = defaultdict(list)
        into: defaultdict[str, list[float]] = defaultdict(list)
        for relay in running:
            target = self._host_of.get(relay.target, relay.target)
            into[target].append(relay.bytes_per_s)
            for source, rate in relay.feeds:
                out[self._host_of.get(source, source)].append(rate)
        remote = self._links[REMOTE].out.peak(self._measured_s) if REMOTE in self._links else 0.0
        found = {REMOTE: self._node(REMOTE, "", max(best, remote), out, into, now)}
        for store in stores:
            leaf = store.failure_domain if store.failure_domain != store.host_id else ""
            found[store.store_id] = self._node(store.host_id, leaf, best, out, into, now)
        return found

    def _node(
        self,
        host_id: str,
        leaf: str,
        best: float,
        out: defaultdict[str, list[float]],
        into: defaultdict[str, list[float]],
        now: float,
    ) -> Node:
        link = self._links.get(host_id) or _Link()
        capacity_out = min(link.out.capacity(best, now), self._cap)
        capacity_in = min(link.into.capacity(best, now), self._cap)
        return Node(
            residual_out=_residual_bytes_per_s(capacity_out, link.out.background(now), out[host_id]),
            residual_in=_residual_bytes_per_s(capacity_in, link.into.background(now), into[host_id]),
            host=host_id,
            busy_out=bool(out[host_id]) or link.out.background(now) > _BUSY_SHARE * capacity_out,
            leaf=leaf,
        )


def _residual_bytes_per_s(capacity: float, background: float, relays: list[float]) -> float:
    """For one more relay: KV comes first, other relays share."""
    free = max(capacity - background, 0.0)
    return max(free - sum(relays), free / (1 + len(relays)))


def _mean_bytes_per_s(copy: PackCopy) -> float:
    """Over the whole relay; 0 where it is not over, or was too short to tell."""
    if not copy.complete or not copy.source:
        return 0.0
    took_s = (copy.relay_end_us - copy.relay_first_us) / 1e6
    return copy.pack_bytes / took_s if took_s >= _MIN_RELAY_S else 0.0
