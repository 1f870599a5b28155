"""``follow`` over real sockets: order, chains, repair, stalls, refusals, and how it ends."""

from __future__ import annotations

import threading

import pytest

from tests.support.wait import wait_until
from tests.unit.transfer.loopback_holders import (
    BlindSink,
    SamplePack,
    receiver,
    serving,
    silent_listener,
    source_at,
    tampering_proxy,
)
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.errors import (
    ChunkDamaged,
    SourceClosed,
    SourcesExhausted,
    SourceStalled,
    TicketExpired,
    TicketRefused,
    UnknownBuffer,
    WrongHolder,
    WrongReceiver,
)
from torchrelay.transfer.fetch.follow import TransferControl, fetch_head, follow
from torchrelay.transfer.fetch.statistics import TransferStats

PACK = SamplePack(100_000)
ALL = list(PACK.chunks)


def test_follow_single_source_keeps_requested_order() -> None:
    wanted = [*reversed(range(5, 20)), 0, 24, *range(1, 5), *range(20, 24)]
    sink = PACK.sink()
    with serving(PACK.buffer()) as holder:
        source = PACK.source(holder.address)
        assert list(PACK.follow([source], sink, wanted)) == wanted
        wait_until(lambda: holder.bytes_sent == len(PACK.data))
        assert fetch_head(source, receiver()) == PACK.head
    assert sink.accepted == wanted
    assert sink.bytes_held == PACK.data


def test_dead_holder_replaced_without_repeated_chunks() -> None:
    sink = PACK.sink()
    with serving(PACK.buffer(), holder_id="host-2") as alternate:
        with serving(PACK.buffer(10), holder_id="host-1") as dying:
            stream = PACK.follow([PACK.source(dying.address, "host-1"), PACK.source(alternate.address, "host-2")], sink)
            assert [next(stream) for _ in range(10)] == ALL[:10]
        assert list(stream) == ALL[10:]
        wait_until(lambda: alternate.bytes_sent == len(PACK.data) - 10 * 4096)
    assert sink.accepted == ALL
    assert sink.bytes_held == PACK.data


def test_damaged_chunk_comes_again_from_alternate() -> None:
    def damage(data: bytes, offset: int) -> bytes:
        place = 40_000 - offset
        if 0 <= place < len(data):
            return data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]
        return data

    sink, stats = PACK.sink(), TransferStats()
    with (
        serving(PACK.buffer(), holder_id="host-1") as host1,
        serving(PACK.buffer(), holder_id="host-2") as host2,
        tampering_proxy(host1.address, damage) as proxy,
    ):
        sources = [PACK.source(proxy, "host-1"), PACK.source(host2.address, "host-2")]
        assert list(PACK.follow(sources, sink, control=TransferControl(stats=stats))) == ALL
        wait_until(lambda: 0 < host2.bytes_sent < len(PACK.data))
    assert stats.num_damaged_chunks == 1
    assert sink.accepted == ALL
    assert sink.bytes_held == PACK.data


def test_only_source_retried_after_damaged_chunk() -> None:
    damaged: list[int] = []

    def damage_once(data: bytes, offset: int) -> bytes:
        if not damaged and offset + len(data) > 50_000:
            damaged.append(offset)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    sink = PACK.sink()
    with serving(PACK.buffer()) as holder, tampering_proxy(holder.address, damage_once) as proxy:
        assert list(PACK.follow([PACK.source(proxy)], sink)) == ALL
    assert damaged
    assert sink.bytes_held == PACK.data


def test_source_with_wrong_bytes_given_up_after_retry() -> None:
    wrong, sink = PACK.buffer(0), PACK.sink()
    for index, piece in enumerate(SamplePack(100_000, seed=9).buffer().pieces):
        wrong.publish(index, piece)
    with serving(wrong) as holder, pytest.raises(SourcesExhausted) as exhausted:
        list(PACK.follow([PACK.source(holder.address)], sink))
    assert [type(cause) for _, cause in exhausted.value.failures] == [ChunkDamaged, ChunkDamaged]
    assert sink.accepted == []


def test_sink_without_digests_trusts_frame_digests() -> None:
    sent, sink = MemoryBuffer("kv-1", [7, 7]), BlindSink(2, 7)
    sent.publish(0, b"a block")
    sent.publish(1, b"trailer")
    with serving(sent) as holder:
        source = source_at(holder.address, "kv-1")
        assert list(follow("kv-1", [0, 1], [source], sink, receiver())) == [0, 1]
        assert fetch_head(source, receiver()) == b""
    assert sink.chunks == [b"a block", b"trailer"]


def test_source_silent_midway_replaced() -> None:
    released = threading.Event()

    def hang(data: bytes, offset: int) -> bytes:
        if offset > 20_000:
            released.wait(60.0)
        return data

    sink = PACK.sink()
    with serving(PACK.buffer()) as holder, tampering_proxy(holder.address, hang) as proxy:
        # The chunk that was arriving is left to the other source, and may be accepted after its neighbors.
        assert sorted(PACK.follow([PACK.source(proxy), PACK.source(holder.address)], sink)) == ALL
        released.set()
    assert sink.bytes_held == PACK.data


def test_waiting_holder_with_keepalives_not_stalled() -> None:
    slow = PACK.buffer(2)
    with serving(slow) as holder:
        stream = PACK.follow([PACK.source(holder.address)], PACK.sink(), range(3), stall_s=1.0)
        assert [next(stream), next(stream)] == [0, 1]
        later = threading.Timer(1.3, slow.show, [2])  # longer than ``stall_s``
        later.start()
        assert next(stream) == 2
        later.join()
        assert holder.num_streams == 1
        stream.close()
        wait_until(lambda: holder.num_streams == 0)


def test_refusals_reach_follower_as_typed_errors() -> None:
    with serving(PACK.buffer()) as holder:
        good = PACK.source(holder.address)
        with pytest.raises(TicketExpired):
            fetch_head(PACK.source(holder.address, expires=1), receiver())
        with pytest.raises(WrongHolder):
            fetch_head(PACK.source(holder.address, "host-x"), receiver())
        with pytest.raises(UnknownBuffer):
            fetch_head(source_at(holder.address, "another pack"), receiver())
        with pytest.raises(WrongReceiver):
            fetch_head(good, receiver("host-x"))
        assert fetch_head(good, receiver()) == PACK.head
        good.ticket.mac = bytes(32)
        with pytest.raises(TicketRefused, match="MAC"):
            fetch_head(good, receiver())


def test_exhausted_sources_listed_with_causes() -> None:
    with silent_listener() as silent, serving(PACK.buffer()) as holder:
        sources = [
            PACK.source(silent, "host-1"),
            PACK.source("127.0.0.1:1", "host-2"),
            PACK.source(holder.address, expires=1),
        ]
        with pytest.raises(SourcesExhausted) as exhausted:
            list(PACK.follow(sources, PACK.sink(), stall_s=0.15))
    causes = {holder_id: type(cause) for holder_id, cause in exhausted.value.failures}
    assert causes == {"host-1": SourceStalled, "host-2": ConnectionRefusedError, "host-h": TicketExpired}
    assert "host-2" in exhausted.value.message
    with pytest.raises(SourcesExhausted, match="no source was given"):
        list(PACK.follow([], PACK.sink()))
    assert list(PACK.follow([], PACK.sink(), [])) == []


@pytest.mark.parametrize("num_published", [0, 5])
def test_stop_ends_follow_without_error(num_published: int) -> None:
    stop, sink = threading.Event(), PACK.sink()

    def stop_waiting_stream() -> None:
        wait_until(lambda: holder.num_streams == 1 and len(sink.accepted) == num_published)
        stop.set()

    with serving(PACK.buffer(num_published)) as holder:
        stopping = threading.Thread(target=stop_waiting_stream)
        stopping.start()
        assert list(PACK.follow([PACK.source(holder.address)], sink, control=TransferControl(stop))) == [
            *range(num_published)
        ]
        stopping.join()
    with silent_listener() as silent, pytest.raises(SourceClosed):
        fetch_head(PACK.source(silent), receiver(), stop=stop)


def test_impostor_holder_refused() -> None:
    # The ticket names host-h; host-x answers at the address, and cannot compute that ticket's session key.
    with serving(PACK.buffer(), holder_id="host-x") as impostor, pytest.raises(TicketRefused):
        fetch_head(PACK.source(impostor.address), receiver())


def test_starved_source_replaced_by_alternate() -> None:
    """Two copies that follow each other after a repair would otherwise wait in a cycle forever."""
    sink = PACK.sink()
    with serving(PACK.buffer(1)) as first, serving(PACK.buffer(), holder_id="host-i") as second:
        sources = [PACK.source(first.address), PACK.source(second.address, "host-i")]
        assert list(PACK.follow(sources, sink, stall_s=20.0, starve_s=0.3)) == ALL
    assert sink.bytes_held == PACK.data
