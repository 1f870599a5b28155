"""Running relays: holders until they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_copy, a_model, a_store
from torchrelay.scheduler.planning import ReceiveProgress, TransferEdge
from torchrelay.scheduler.policy.core import REMOTE, SourceShare
from torchrelay.scheduler.policy.relay.running_relays import RunningRelays, whole_holders

MODEL = a_model()


def test_running_relays_are_holders_until_they_end() -> None:
    relays = RunningRelays()
    relays.start(MODEL.pack_id, [TransferEdge("s1", (REMOTE,)), TransferEdge("s2", ("s1", REMOTE))], now=100.0)
    assert relays.filling(MODEL.pack_id, []) == ("s1", "s2")
    assert relays.outgoing() == {REMOTE: 1, "s1": 1}
    relays.observe(a_store("s1", "h1", [a_copy(MODEL, 3)]), now=101.0)
    assert len(relays) == 2
    relays.observe(a_store("s1", "h1", [a_copy(MODEL)]), now=102.0)
    assert relays.filling(MODEL.pack_id, []) == ("s2",)
    relays.observe(a_store("s2", "h2"), now=200.0)  # it never began
    assert len(relays) == 0


def test_stores_of_one_plan_keep_its_order() -> None:
    relays = RunningRelays()
    relays.start(MODEL.pack_id, [TransferEdge("s9", (REMOTE,)), TransferEdge("s2", ("s9", REMOTE))], now=100.0)
    relays.restart(MODEL.pack_id, TransferEdge("s9", ("s5", REMOTE)), now=103.0)
    assert relays.filling(MODEL.pack_id, []) == ("s9", "s2")
    (relay,) = relays.into("s9")
    assert (relay.upstream, relay.started_at, relay.replanned_at) == ("s5", 100.0, 103.0)


def test_every_striped_source_sends_its_share() -> None:
    relays = RunningRelays()
    edge = TransferEdge("s3", ("s1", "s2", REMOTE), num_striped=2, shares=(0.75, 0.25), bytes_per_s=100.0)
    relays.start(MODEL.pack_id, [edge, TransferEdge("s4", ("s1",), already_there=True)], now=1.0, urgent=False)
    (relay,) = relays.running()
    assert relay.feeds == (("s1", 75.0), ("s2", 25.0)) and not relay.urgent
    assert relays.outgoing() == {"s1": 1, "s2": 1}
    relays.lose("s3")
    assert not relays.running()


def test_how_far_copies_are() -> None:
    relays = RunningRelays()
    relays.start(
        MODEL.pack_id,
        [TransferEdge("s1", (REMOTE,), bytes_per_s=5.0), TransferEdge("s2", ("s1",), bytes_per_s=5.0)],
        1.0,
    )
    shares = (SourceShare("s0", 10, 40.0, True), SourceShare("s9", 10, 2.0, True))
    stores = [
        a_store("s1", "h1", [replace(a_copy(MODEL, 2), shares=shares)]),
        a_store("s2", "h2"),
        a_store("s3", "h3", [a_copy(MODEL)]),
    ]
    found = relays.arriving(MODEL.pack_id, stores)
    assert found == {"s1": ReceiveProgress(0.25, 42.0), "s2": ReceiveProgress(0.0, 5.0)}
    assert found["s1"].serves_bytes_per_s == pytest.approx(56.0)  # it has a quarter's lead


def test_whole_holders_are_those_with_every_chunk() -> None:
    stores = [a_store("s1", "h1", [a_copy(MODEL)]), a_store("s2", "h2", [a_copy(MODEL, 7)]), a_store("s3", "h3")]
    assert whole_holders(MODEL.pack_id, stores) == ("s1",)
