"""follow over real sockets: order, chains, repair, stalls, refusals, and how it ends."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest

from tests.unit.transfer.loopback_holders import (
    BlindSink,
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
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.errors import (
    BufferLost,
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
from torchrelay.transfer.fetch.follow import FollowOptions, TransferControl, fetch_head, follow
from torchrelay.transfer.manifest import pack_id_of

DATA, MANIFEST = make_pack(100_000)
PACK_ID = pack_id_of(MANIFEST.encode())
ALL = range(MANIFEST.num_chunks)


def empty_pack() -> PackSink:
    return PackSink(PACK_ID, DATA, MANIFEST)


def full_pack() -> FixedBuffer:
    return FixedBuffer(PACK_ID, DATA, MANIFEST)


def test_one_hop_brings_everything_in_the_order_asked_for() -> None:
    wanted = [*reversed(range(5, 20)), 0, 24, *range(1, 5), *range(20, 24)]
    sink = empty_pack()
    with serving(full_pack()) as holder:
        source = source_at(holder.address, PACK_ID)
        assert list(follow(PACK_ID, wanted, [source], sink, receiver())) == wanted
        assert eventually(lambda: holder.bytes_sent == len(DATA))
        assert fetch_head(source, receiver()) == MANIFEST.encode()
    assert sink.accepted == wanted
    assert sink.bytes_held == DATA


def test_nothing_wanted_asks_nobody() -> None:
    assert list(follow(PACK_ID, [], [], empty_pack(), receiver())) == []


def test_host_3_has_its_first_chunk_before_host_1_has_its_last() -> None:
    first = FixedBuffer(PACK_ID, DATA, MANIFEST, published=1)
    second, third = empty_pack(), empty_pack()
    with ExitStack() as stack:
        host1 = stack.enter_context(serving(first, holder_id="host-1"))
        host2 = stack.enter_context(serving(second, holder_id="host-2"))
        upper = source_at(host1.address, PACK_ID, "host-1", "host-2")
        lower = source_at(host2.address, PACK_ID, "host-2", "host-3")
        filling = threading.Thread(target=lambda: list(follow(PACK_ID, ALL, [upper], second, receiver("host-2"))))
        filling.start()
        stream = follow(PACK_ID, ALL, [lower], third, receiver("host-3"))
        assert next(stream) == 0
        for index in ALL[1:]:
            first.publish(index, first.pieces[index])
        assert list(stream) == list(ALL[1:])
        filling.join()
        assert eventually(lambda: host1.bytes_sent == host2.bytes_sent == len(DATA))
    assert third.bytes_held == DATA


def test_a_holder_that_dies_is_replaced_and_nothing_is_sent_twice() -> None:
    sink = empty_pack()
    with serving(full_pack(), holder_id="host-2") as alternate:
        first = FixedBuffer(PACK_ID, DATA, MANIFEST, published=10)
        with serving(first, holder_id="host-1") as dying:
            sources = [
                source_at(dying.address, PACK_ID, "host-1"),
                source_at(alternate.address, PACK_ID, "host-2"),
            ]
            stream = follow(PACK_ID, ALL, sources, sink, receiver())
            assert [next(stream) for _ in range(10)] == list(range(10))
        assert list(stream) == list(ALL[10:])
        assert eventually(lambda: alternate.bytes_sent == len(DATA) - 10 * 4096)
    assert sink.accepted == list(ALL)
    assert sink.bytes_held == DATA


def test_a_holder_that_gives_up_is_replaced() -> None:
    failing = FixedBuffer(PACK_ID, DATA, MANIFEST, published=3)
    sink = empty_pack()
    with serving(failing, holder_id="host-1") as host1, serving(full_pack(), holder_id="host-2") as host2:
        sources = [source_at(host1.address, PACK_ID, "host-1"), source_at(host2.address, PACK_ID, "host-2")]
        stream = follow(PACK_ID, ALL, sources, sink, receiver())
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        failing.fail("its own sources are gone")
        assert list(stream) == list(ALL[3:])
    assert sink.bytes_held == DATA


def test_damaged_bytes_are_never_accepted_and_come_anew_from_the_next_source() -> None:
    def damage(data: bytes, offset: int) -> bytes:
        place = 40_000 - offset
        if 0 <= place < len(data):
            return data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]
        return data

    sink = empty_pack()
    with (
        serving(full_pack(), holder_id="host-1") as host1,
        serving(full_pack(), holder_id="host-2") as host2,
        tampering_proxy(host1.address, damage) as proxy,
    ):
        sources = [source_at(proxy, PACK_ID, "host-1"), source_at(host2.address, PACK_ID, "host-2")]
        assert list(follow(PACK_ID, ALL, sources, sink, receiver())) == list(ALL)
        assert eventually(lambda: 0 < host2.bytes_sent < len(DATA))
    assert sink.accepted == list(ALL)
    assert sink.bytes_held == DATA


def test_the_only_source_gets_a_second_chance_after_damage() -> None:
    damaged: list[int] = []

    def damage_once(data: bytes, offset: int) -> bytes:
        if not damaged and offset + len(data) > 50_000:
            damaged.append(offset)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    sink = empty_pack()
    with serving(full_pack()) as holder, tampering_proxy(holder.address, damage_once) as proxy:
        assert list(follow(PACK_ID, ALL, [source_at(proxy, PACK_ID)], sink, receiver())) == list(ALL)
    assert damaged
    assert sink.bytes_held == DATA


def test_a_source_that_always_damages_is_given_up() -> None:
    wrong = FixedBuffer(PACK_ID, make_pack(100_000, seed=9)[0], MANIFEST)
    sink = empty_pack()
    with serving(wrong) as holder, pytest.raises(SourcesExhausted) as exhausted:
        list(follow(PACK_ID, ALL, [source_at(holder.address, PACK_ID)], sink, receiver()))
    assert [type(cause) for _, cause in exhausted.value.failures] == [ChunkDamaged, ChunkDamaged]
    assert sink.accepted == []


def test_without_an_expected_digest_the_frame_s_own_counts() -> None:
    sent, sink = MemoryBuffer("kv-1", [7, 7]), BlindSink(2, 7)
    sent.publish(0, b"a block")
    sent.publish(1, b"trailer")
    with serving(sent) as holder:
        source = source_at(holder.address, "kv-1")
        assert list(follow("kv-1", [0, 1], [source], sink, receiver())) == [0, 1]
        assert fetch_head(source, receiver()) == b""
    assert sink.chunks == [b"a block", b"trailer"]


def test_a_silent_source_is_left_for_the_next() -> None:
    sink = empty_pack()
    with silent_listener() as silent, serving(full_pack()) as holder:
        sources = [source_at(silent, PACK_ID), source_at(holder.address, PACK_ID)]
        begin = time.monotonic()
        assert list(follow(PACK_ID, ALL, sources, sink, receiver(), FollowOptions(stall_s=0.3))) == list(ALL)
        assert 0.3 <= time.monotonic() - begin < 2.0


def test_a_source_that_falls_silent_midway_is_left_too() -> None:
    released = threading.Event()

    def hang(data: bytes, offset: int) -> bytes:
        if offset > 20_000:
            released.wait(5.0)
        return data

    sink = empty_pack()
    with serving(full_pack()) as holder, tampering_proxy(holder.address, hang) as proxy:
        sources = [source_at(proxy, PACK_ID), source_at(holder.address, PACK_ID)]
        # The chunk that was arriving is left to the other source, and may be accepted after its neighbors.
        assert sorted(follow(PACK_ID, ALL, sources, sink, receiver())) == list(ALL)
        released.set()
    assert sink.bytes_held == DATA


def test_a_slow_holder_is_not_a_silent_one() -> None:
    slow = FixedBuffer(PACK_ID, DATA, MANIFEST, published=2)
    with serving(slow) as holder:
        stream = follow(
            PACK_ID,
            range(3),
            [source_at(holder.address, PACK_ID)],
            empty_pack(),
            receiver(),
            FollowOptions(stall_s=0.3),
        )
        assert [next(stream), next(stream)] == [0, 1]
        later = threading.Timer(1.0, lambda: slow.publish(2, slow.pieces[2]))
        later.start()
        assert next(stream) == 2
        later.join()


def test_refusals_have_names() -> None:
    with serving(full_pack()) as holder:
        good = source_at(holder.address, PACK_ID)
        expired = source_at(holder.address, PACK_ID, expires=1)
        elsewhere = source_at(holder.address, PACK_ID, holder_id="host-x")
        unknown = source_at(holder.address, "another pack")
        with pytest.raises(TicketExpired):
            fetch_head(expired, receiver())
        with pytest.raises(WrongHolder):
            fetch_head(elsewhere, receiver())
        with pytest.raises(UnknownBuffer):
            fetch_head(unknown, receiver())
        with pytest.raises(WrongReceiver):
            fetch_head(good, receiver("host-x"))
        assert fetch_head(good, receiver()) == MANIFEST.encode()
        good.ticket.mac = bytes(32)
        with pytest.raises(TicketRefused, match="MAC"):
            fetch_head(good, receiver())


def test_exhausted_sources_are_named_with_their_causes() -> None:
    with silent_listener() as silent, serving(full_pack()) as holder:
        sources = [
            source_at(silent, PACK_ID, "host-1"),
            source_at("127.0.0.1:1", PACK_ID, "host-2"),
            source_at(holder.address, PACK_ID, expires=1),
        ]
        with pytest.raises(SourcesExhausted) as exhausted:
            list(follow(PACK_ID, ALL, sources, empty_pack(), receiver(), FollowOptions(stall_s=0.15)))
    causes = {holder_id: type(cause) for holder_id, cause in exhausted.value.failures}
    assert causes == {"host-1": SourceStalled, "host-2": ConnectionRefusedError, "host-h": TicketExpired}
    assert "host-2" in exhausted.value.message
    with pytest.raises(SourcesExhausted, match="no source was given"):
        list(follow(PACK_ID, ALL, [], empty_pack(), receiver()))


def test_closing_the_generator_closes_its_connection() -> None:
    waiting = FixedBuffer(PACK_ID, DATA, MANIFEST, published=1)
    with serving(waiting) as holder:
        stream = follow(PACK_ID, ALL, [source_at(holder.address, PACK_ID)], empty_pack(), receiver())
        assert next(stream) == 0
        assert holder.num_streams == 1
        stream.close()
        assert eventually(lambda: holder.num_streams == 0)


@pytest.mark.parametrize("published", [0, 5])
def test_stop_ends_it_soon(published: int) -> None:
    waiting = FixedBuffer(PACK_ID, DATA, MANIFEST, published=published)
    stop, stopped = threading.Event(), []

    def stop_it() -> None:
        stopped.append(time.monotonic())
        stop.set()

    with serving(waiting) as holder:
        (timer := threading.Timer(0.2, stop_it)).start()
        sources = [source_at(holder.address, PACK_ID)]
        assert list(follow(PACK_ID, ALL, sources, empty_pack(), receiver(), control=TransferControl(stop))) == [
            *range(published)
        ]
        assert time.monotonic() - stopped[0] < 1.0
        timer.join()
    with silent_listener() as silent, pytest.raises(SourceClosed):
        fetch_head(source_at(silent, PACK_ID), receiver(), stop=stop)


def test_what_the_sink_raises_is_not_the_source_s_fault() -> None:
    class DroppedSink(PackSink):
        def accept(self, index: int) -> None:
            raise BufferLost("dropped meanwhile")

    dropped = DroppedSink(PACK_ID, DATA, MANIFEST)
    with serving(full_pack()) as holder, pytest.raises(BufferLost, match="dropped meanwhile"):
        list(follow(PACK_ID, ALL, [source_at(holder.address, PACK_ID)] * 2, dropped, receiver()))


def test_a_holder_must_prove_itself() -> None:
    # The ticket names host-h; host-x answers at the address, and cannot compute that ticket's session key.
    with serving(full_pack(), holder_id="host-x") as impostor, pytest.raises(TicketRefused):
        fetch_head(source_at(impostor.address, PACK_ID), receiver())


def test_a_source_that_only_says_it_is_alive_is_left_for_the_next() -> None:
    """Two copies that follow each other after a repair would otherwise wait in a circle forever."""
    waiting, whole = FixedBuffer(PACK_ID, DATA, MANIFEST, published=1), FixedBuffer(PACK_ID, DATA, MANIFEST)
    sink = PackSink(PACK_ID, DATA, MANIFEST)
    with serving(waiting) as first, serving(whole, holder_id="host-i") as second:
        sources = [source_at(first.address, PACK_ID), source_at(second.address, PACK_ID, "host-i")]
        chunks = range(MANIFEST.num_chunks)
        assert list(follow(PACK_ID, chunks, sources, sink, receiver(), FollowOptions(stall_s=0.4, starve_s=0.3))) == [
            *chunks
        ]
    assert sink.bytes_held == DATA
