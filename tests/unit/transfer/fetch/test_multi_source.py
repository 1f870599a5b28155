"""follow from several holders over real sockets: striping, slow, silent and starved ones, circles, and resuming."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.unit.transfer.loopback_holders import (
    FixedBuffer,
    PackSink,
    eventually,
    make_pack,
    receiver,
    serving,
    silent_listener,
    source_at,
    tampering_proxy,
)
from torchrelay.transfer.errors import BufferLost, SourcesExhausted
from torchrelay.transfer.fetch.follow import FollowOptions, TransferControl, follow
from torchrelay.transfer.fetch.sources import SourceAddress, SourceUpdates
from torchrelay.transfer.fetch.statistics import TransferStats
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.transport.interface import TransferClass
from torchrelay.transfer.transport.tcp import TcpConnection

DATA, MANIFEST = make_pack(4 << 20, chunk_bytes=32768)
PACK_ID = pack_id_of(MANIFEST.encode())
ALL = range(MANIFEST.num_chunks)


def empty_pack() -> PackSink:
    return PackSink(PACK_ID, DATA, MANIFEST)


def full_pack(published: int | None = None) -> FixedBuffer:
    return FixedBuffer(PACK_ID, DATA, MANIFEST, published)


def paced(bytes_per_s: Callable[[int], float]) -> Callable[[bytes, int], bytes]:
    """For a proxy: limits the rate, by how many bytes have passed."""

    def tamper(data: bytes, offset: int) -> bytes:
        time.sleep(len(data) / bytes_per_s(offset))
        return data

    return tamper


def test_two_sources_bring_disjoint_parts_at_once() -> None:
    sink, stats = empty_pack(), TransferStats()
    with (
        serving(full_pack(), holder_id="host-1") as host1,
        serving(full_pack(), holder_id="host-2") as host2,
        tampering_proxy(host1.address, paced(lambda _: 8e6)) as proxy1,
        tampering_proxy(host2.address, paced(lambda _: 8e6)) as proxy2,
    ):
        sources = [source_at(proxy1, PACK_ID, "host-1"), source_at(proxy2, PACK_ID, "host-2")]
        assert sorted(
            follow(PACK_ID, ALL, sources, sink, receiver(), FollowOptions(num_striped=2), TransferControl(stats=stats))
        ) == list(ALL)
    assert sink.bytes_held == DATA
    assert sorted(sink.accepted) == list(ALL)
    brought = {share.holder_id: share.num_bytes for share in stats.by_source()}
    assert sum(brought.values()) == len(DATA)
    assert min(brought.values()) > len(DATA) // 4


def test_a_source_that_turns_slow_is_helped_and_goes_on() -> None:
    sink, stats = empty_pack(), TransferStats()
    with (
        serving(full_pack(), holder_id="host-1") as host1,
        serving(full_pack(), holder_id="host-2") as host2,
        tampering_proxy(host1.address, paced(lambda passed: 5e6 if passed < 2 << 20 else 0.4e6)) as proxy,
    ):
        sources = [source_at(proxy, PACK_ID, "host-1"), source_at(host2.address, PACK_ID, "host-2")]
        begin = time.monotonic()
        assert sorted(follow(PACK_ID, ALL, sources, sink, receiver(), control=TransferControl(stats=stats))) == list(
            ALL
        )
        assert time.monotonic() - begin < 4.0  # alone it would take 5.6 s
    assert sink.bytes_held == DATA
    assert sorted(sink.accepted) == list(ALL)
    first, second = stats.by_source()
    assert first.num_bytes > len(DATA) // 3
    assert second.num_bytes > len(DATA) // 10
    assert stats.num_repairs >= 1
    assert first.error == ""


def test_an_alternate_joins_long_before_a_silent_source_is_given_up() -> None:
    sink, stats = empty_pack(), TransferStats()
    with silent_listener() as silent, serving(full_pack(), holder_id="host-2") as host2:
        sources = [source_at(silent, PACK_ID, "host-1"), source_at(host2.address, PACK_ID, "host-2")]
        begin = time.monotonic()
        assert list(
            follow(PACK_ID, ALL, sources, sink, receiver(), FollowOptions(stall_s=30.0), TransferControl(stats=stats))
        ) == list(ALL)
        assert time.monotonic() - begin < 3.0
    assert stats.num_repairs == 1
    assert stats.largest == "host-2"


def test_a_source_added_meanwhile_is_an_alternate() -> None:
    sink, stats, updates = empty_pack(), TransferStats(), SourceUpdates()
    control = TransferControl(updates=updates, stats=stats)
    with (
        serving(full_pack(published=4), holder_id="host-1") as host1,
        serving(full_pack(), holder_id="host-2") as host2,
    ):
        sources = [source_at(host1.address, PACK_ID, "host-1")]
        following = follow(PACK_ID, ALL, sources, sink, receiver(), control=control)
        assert [next(following) for _ in range(4)] == list(ALL[:4])
        updates.add([source_at(host2.address, PACK_ID, "host-2")])
        assert sorted(following) == list(ALL[4:])
    assert sink.bytes_held == DATA
    assert {share.holder_id: share.num_bytes > 0 for share in stats.by_source()} == {"host-1": True, "host-2": True}


def test_a_running_transfer_can_be_striped() -> None:
    sink, stats, updates = empty_pack(), TransferStats(), SourceUpdates()
    control = TransferControl(updates=updates, stats=stats)
    with (
        serving(full_pack(), holder_id="host-1") as host1,
        serving(full_pack(), holder_id="host-2") as host2,
        tampering_proxy(host1.address, paced(lambda _: 8e6)) as proxy1,
        tampering_proxy(host2.address, paced(lambda _: 8e6)) as proxy2,
    ):
        sources = [source_at(proxy1, PACK_ID, "host-1"), source_at(proxy2, PACK_ID, "host-2")]
        following = follow(PACK_ID, ALL, sources[:1], sink, receiver(), control=control)
        assert next(following) == 0
        updates.add(sources[1:], num_striped=2)
        assert sorted(following) == list(ALL[1:])
    brought = {share.holder_id: share.num_bytes for share in stats.by_source()}
    assert min(brought.values()) > len(DATA) // 5
    assert stats.num_repairs == 0


def test_an_idle_transfer_becomes_urgent_once_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, stats, updates = empty_pack(), TransferStats(), SourceUpdates()
    classes: list[TransferClass] = []
    monkeypatch.setattr(TcpConnection, "set_class", lambda _, transfer_class: classes.append(transfer_class))
    with (
        serving(full_pack(), holder_id="host-1") as host1,
        serving(full_pack(), holder_id="host-2") as host2,
        tampering_proxy(host1.address, paced(lambda passed: 8e6 if passed < 2 << 20 else 0.4e6)) as proxy,
    ):
        sources = [source_at(proxy, PACK_ID, "host-1"), source_at(host2.address, PACK_ID, "host-2")]
        idle = TransferClass.IDLE
        following = follow(
            PACK_ID,
            ALL,
            sources,
            sink,
            receiver(),
            FollowOptions(transfer_class=idle),
            TransferControl(updates=updates, stats=stats),
        )
        assert next(following) == 0
        assert classes == [idle]
        updates.add(transfer_class=TransferClass.URGENT)
        begin = time.monotonic()
        assert sorted(following) == list(ALL[1:])
        assert time.monotonic() - begin < 4.0  # an idle one would not have joined the other
    assert sink.bytes_held == DATA and sorted(sink.accepted) == list(ALL)
    assert classes[1:] and set(classes[1:]) == {TransferClass.URGENT}
    assert {share.error for share in stats.by_source()} == {""}


def test_a_holder_that_refused_gets_a_new_chance_with_a_new_ticket() -> None:
    sink, updates = empty_pack(), SourceUpdates()
    with serving(full_pack(), holder_id="host-1") as host1, serving(full_pack(0), holder_id="host-2") as host2:
        expired = source_at(host1.address, PACK_ID, "host-1", expires=1)
        sources = [expired, source_at(host2.address, PACK_ID, "host-2")]
        following = follow(
            PACK_ID, ALL, sources, sink, receiver(), FollowOptions(num_striped=2), TransferControl(updates=updates)
        )
        offering = threading.Timer(0.3, lambda: updates.add([source_at(host1.address, PACK_ID, "host-1")]))
        offering.start()
        assert sorted(following) == list(ALL)
        offering.join()
    assert sink.bytes_held == DATA


def test_a_chunk_that_one_source_lacks_comes_from_the_other() -> None:
    sink = empty_pack()
    partial = full_pack(published=0)
    for index in ALL[::2]:
        partial.publish(index, partial.pieces[index])
    with serving(partial, holder_id="host-1") as host1, serving(full_pack(), holder_id="host-2") as host2:
        sources = [source_at(host1.address, PACK_ID, "host-1"), source_at(host2.address, PACK_ID, "host-2")]
        assert sorted(follow(PACK_ID, ALL, sources, sink, receiver(), FollowOptions(num_striped=2))) == list(ALL)
    assert sink.bytes_held == DATA


def test_copies_in_a_circle_fill_each_other_when_a_third_has_the_rest() -> None:
    """Each has what the other lacks, except one chunk that only the alternate of one of them has."""
    sinks = [empty_pack(), empty_pack()]
    missing = []
    for number, sink in enumerate(sinks):
        have = [index for index in ALL[:-1] if index % 2 == number]
        for index in have:
            sink.publish(index, sink.pieces[index])
        missing.append([index for index in ALL if index not in have])
    with ExitStack() as stack:
        hosts = [stack.enter_context(serving(sink, holder_id=f"host-{n}")) for n, sink in enumerate(sinks)]
        whole = stack.enter_context(serving(full_pack(), holder_id="host-w"))

        def sources(number: int) -> list[SourceAddress]:
            other = 1 - number
            found = [source_at(hosts[other].address, PACK_ID, f"host-{other}", f"host-{number}")]
            return found + ([source_at(whole.address, PACK_ID, "host-w", "host-0")] if number == 0 else [])

        def fill(number: int) -> None:
            list(follow(PACK_ID, missing[number], sources(number), sinks[number], receiver(f"host-{number}")))

        threads = [threading.Thread(target=fill, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert eventually(lambda: whole.bytes_sent == len(sinks[0].pieces[-1]))
    assert all(sink.bytes_held == DATA for sink in sinks)


def test_a_holder_that_was_restarted_is_asked_for_the_rest_only() -> None:
    sink = empty_pack()
    with serving(full_pack(published=50)) as holder:
        stream = follow(PACK_ID, ALL, [source_at(holder.address, PACK_ID)], sink, receiver())
        assert [next(stream) for _ in range(50)] == list(range(50))
    with pytest.raises(SourcesExhausted):
        next(stream)
    with serving(full_pack()) as again:
        missing = [index for index in ALL if index not in sink.accepted]
        assert list(follow(PACK_ID, missing, [source_at(again.address, PACK_ID)], sink, receiver())) == missing
        assert eventually(lambda: again.bytes_sent == len(DATA) - 50 * 32768)
    assert sink.bytes_held == DATA


def test_every_class_is_served() -> None:
    sink = empty_pack()
    with serving(full_pack()) as holder:
        source = source_at(holder.address, PACK_ID)
        for transfer_class in TransferClass:
            chunk = [int(transfer_class)]
            assert (
                list(follow(PACK_ID, chunk, [source], sink, receiver(), FollowOptions(transfer_class=transfer_class)))
                == chunk
            )


def test_what_a_sink_raises_in_another_thread_ends_the_transfer() -> None:
    class FullSink(PackSink):
        def accept(self, index: int) -> None:
            if index >= 40:
                raise BufferLost("dropped meanwhile")
            super().accept(index)

    with serving(full_pack(), holder_id="host-1") as host1, serving(full_pack(), holder_id="host-2") as host2:
        sources = [source_at(host1.address, PACK_ID, "host-1"), source_at(host2.address, PACK_ID, "host-2")]
        with pytest.raises(BufferLost, match="dropped meanwhile"):
            list(
                follow(
                    PACK_ID, ALL, sources, FullSink(PACK_ID, DATA, MANIFEST), receiver(), FollowOptions(num_striped=2)
                )
            )
        assert eventually(lambda: host1.num_streams == host2.num_streams == 0)
