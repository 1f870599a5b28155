"""The capacity of links and what they have left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_copy, a_model, a_store, a_worker
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.relay.links import Links, RateMeter
from torchrelay.scheduler.policy.relay.planning import DEFAULT_BYTES_PER_S, Node
from torchrelay.scheduler.policy.relay.transfers import Transfer, TransferEventKind, Transfers
from torchrelay.scheduler.policy.types import REMOTE, NicCounters, SourceShare, StoreStatus

MODEL = a_model()
MB = 1e6
S1, S2, S3 = (a_store(f"s{number}", f"h{number}") for number in (1, 2, 3))


def receiving(store: StoreStatus, **mb_per_s: float) -> StoreStatus:
    """The store follows these sources."""
    shares = tuple(SourceShare(source, 0, rate * MB, True) for source, rate in mb_per_s.items())
    return replace(store, copies={MODEL.pack_id: replace(a_copy(MODEL, 3), relay_begin_us=1, shares=shares)})


class Reports:
    """Reports of stores, and what links learn from them."""

    def __init__(self, *stores: StoreStatus, now: float = 100.0) -> None:
        self.transfers = Transfers(Membership(fence_s=1.0))
        self.links = Links()
        self.last: dict[str, StoreStatus] = {}
        for store in stores:
            self(store, now)

    def __call__(self, store: StoreStatus, now: float) -> None:
        events = self.transfers.observe(store, self.last.get(store.store_id), now)
        finished = [event.transfer for event in events if event.kind is TransferEventKind.FINISHED]
        self.links.observe_store(store, finished, now)
        self.last[store.store_id] = store

    def node(self, store: StoreStatus, now: float, *running: Transfer) -> Node:
        return self.links.nodes([store], running, now)[store.store_id]


def test_meter_smooths_and_survives_counter_reset() -> None:
    meter = RateMeter()
    for tick in range(101):
        meter.observe(tick * 1000, 100 + tick / 10)
    assert meter.bytes_per_s(110.0) == pytest.approx(10_000, rel=1e-3)
    meter.observe(0, 110.1)
    meter.observe(1000, 110.2)
    assert meter.bytes_per_s(110.2) == pytest.approx(10_000, rel=1e-3)
    assert meter.bytes_per_s(115.0) == 0.0  # silent


def test_reached_rate_is_capacity_of_all_links() -> None:
    report = Reports(S1, S2, S3)
    report(receiving(S2, s1=30, s3=10), 100.5)
    nodes = report.links.nodes([S1, S2, S3], [], 100.5)
    assert nodes["s2"].residual_in == 40 * MB
    assert nodes["s1"].residual_out == nodes["s3"].residual_out == 40 * MB  # the target may have been what held it up
    assert nodes["s2"].residual_out == nodes["s3"].residual_in == 80 * MB  # not tried yet


def test_sender_reaches_sum_of_what_its_followers_get() -> None:
    report = Reports(S1, S2, S3)
    for store in (S2, S3):
        report(receiving(store, s1=30), 100.5)
    assert report.node(S1, 100.5).residual_out == 60 * MB
    report.links.fell_short("s1", 100.5)
    report(receiving(S2), 100.6)  # it follows another source now
    report(receiving(S3, s1=70), 100.6)
    assert report.node(S1, 100.6).residual_out == 60 * MB, "it is not known to be faster yet"
    report(receiving(S2, s1=70), 100.7)
    assert report.node(S1, 100.7).residual_out == pytest.approx(140 * MB, rel=1e-3)


def test_remote_transfers_do_not_measure_links() -> None:
    report = Reports(S1, S2)
    copy = replace(
        a_copy(MODEL), source=REMOTE, relay_begin_us=99_000_000, relay_first_us=99_900_000, relay_end_us=100_000_000
    )
    report(receiving(S1, remote=900), 100.0)
    report(replace(S2, copies={MODEL.pack_id: copy}), 100.1)
    nodes = report.links.nodes([S1, S2], [], 100.1)
    assert nodes["s1"].residual_in == nodes["s2"].residual_in == nodes["s1"].residual_out == DEFAULT_BYTES_PER_S
    assert nodes[REMOTE].residual_out == pytest.approx(900 * MB, rel=1e-3)


def test_peak_fades_only_while_transfers_are_measured() -> None:
    report = Reports(S1, S2, S3)
    report(receiving(S2, s1=100), 100.5)
    report(S2, 100.6)
    night_later = 40_000.0
    for store in (S1, S2, S3):
        report(store, night_later)
    assert report.node(S2, night_later).residual_in == 100 * MB
    for tick in range(3001):  # 300 s, the half-life
        report(receiving(S3, s1=20), night_later + tick / 10)
    assert report.node(S2, night_later + 300).residual_in == pytest.approx(50 * MB, rel=0.01)


def test_link_of_lost_store_counts_as_untried_again() -> None:
    report = Reports(S1, S2)
    report(receiving(S2, s1=30), 100.5)
    assert report.node(S1, 100.5).residual_out == 30 * MB
    report.links.forget_store(S1)
    assert report.node(S1, 100.5).residual_out == 60 * MB
    report(receiving(S2, s1=90), 100.6)  # it follows it still
    assert report.node(S1, 100.6).residual_out == 60 * MB


@pytest.mark.parametrize("clock_ahead_s", [-3600, 0, 3600])
def test_relay_end_is_learned_once_regardless_of_clock(clock_ahead_s: int) -> None:
    first_us = 1_000_000 * (100 + clock_ahead_s) + 3_600_000_000
    ended = replace(a_copy(MODEL), source="s1", relay_begin_us=1, relay_first_us=first_us)
    whole = replace(S2, copies={MODEL.pack_id: replace(ended, relay_end_us=first_us + 500_000)})
    assert Reports(S1, whole, now=3700.0).node(S1, 3700.0).residual_out == DEFAULT_BYTES_PER_S, "it may be long ago"
    report = Reports(S1, S2, now=3700.0)
    report(whole, 3700.5)
    assert report.node(S1, 3700.5).residual_out == MODEL.pack_bytes / 0.5
    # Nothing is learned again from the same stamps: the peak fades by what is measured meanwhile.
    for tick in range(3001):
        report(receiving(S3, s1=1), 3701.0 + tick / 10)
        report(whole, 3701.0 + tick / 10)
    assert report.node(S1, 4001.0).residual_out == pytest.approx(MODEL.pack_bytes / 0.5 / 2, rel=0.01)


def test_background_is_kv_of_its_direction_or_interface_traffic_beside_relays() -> None:
    report = Reports()
    for tick in range(100):
        now = 100 + tick / 10
        sent = {"nic": NicCounters(int(tick * 5 * MB), 0, 100 * MB), "bytes_sent": int(tick * 3 * MB)}
        report(replace(S1, nic=NicCounters(0, 0, 100 * MB)), now)
        report(replace(S2, **sent), now)  # type: ignore[arg-type]
        report.links.observe_worker(a_worker("w", "h1", kv_bytes_sent=int(tick * 3 * MB), kv_bytes_received=0), now)
    node = report.node(S1, now)
    assert node.residual_out == pytest.approx(70 * MB, rel=1e-2) and node.busy_out
    assert node.residual_in == 100 * MB
    assert report.node(S2, now).residual_out == pytest.approx(80 * MB, rel=1e-2)
    assert not report.node(S1, now + 5).busy_out  # the worker fell silent


FAST_1, FAST_2 = (replace(store, nic=NicCounters(0, 0, 100 * MB)) for store in (S1, S2))


def test_running_relays_take_planned_rates_and_share_when_full() -> None:
    report = Reports(FAST_1, FAST_2)
    transfer = Transfer("p", "s2", 1, 100.0, {"s1": 60 * MB}, 60 * MB)
    nodes = report.links.nodes([S1, S2], [transfer], 100.0)
    assert nodes["s1"].residual_out == nodes["s2"].residual_in == 50 * MB
    assert nodes["s1"].busy_out and not nodes["s2"].busy_out
    assert nodes["s1"].residual_in == 100 * MB
    small = replace(transfer, sources={"s1": 20 * MB}, planned_bytes_per_s=20 * MB)
    assert report.node(S1, 100.0, small).residual_out == 80 * MB


def test_short_direction_is_slow_for_a_while_and_is_tried_less_often() -> None:
    report = Reports(FAST_1, FAST_2, S3, now=1000.0)
    report(receiving(S2, s1=5), 1000.0)
    report(receiving(S3, s2=50), 1000.0)
    assert report.node(S2, 1000.0).residual_in == 50 * MB
    report.links.took_less(S2, 1000.0)
    assert report.node(S2, 1000.0).residual_in == 5 * MB
    tried_at = []
    for second in range(1000, 4600):
        if report.node(S1, float(second)).residual_out > 5 * MB:
            tried_at.append(second)
            report.links.fell_short("s1", float(second))
    assert tried_at == [1000, 1030, 1090, 1210, 1450, 1930, 2890, 3850], "and not every 30 s"
    report(receiving(S2, s1=80), 4600.0)
    assert report.node(S1, 4600.0).residual_out == pytest.approx(80 * MB), "it has become faster"
