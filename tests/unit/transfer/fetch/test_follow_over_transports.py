"""follow and its holder over every transport: packs large and small, refusals, silence, ends, many at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.unit.transfer.loopback_holders import (
    FixedBuffer,
    PackSink,
    eventually,
    make_pack,
    receiver,
    serving,
    source_at,
)
from tests.unit.transfer.transport.transport_cases import TRANSPORTS, TransportCase, make_case
from torchrelay.transfer.errors import SourcesExhausted, SourceStalled, TicketExpired
from torchrelay.transfer.fetch.follow import FollowOptions, TransferControl, fetch_head, follow
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.interface import TransferClass

DATA, MANIFEST = make_pack(100_000)
PACK_ID = pack_id_of(MANIFEST.encode())
ALL = range(MANIFEST.num_chunks)


@pytest.fixture(params=TRANSPORTS)
def case(request: pytest.FixtureRequest) -> Iterator[TransportCase]:
    with TemporaryDirectory() as folder:
        yield make_case(request.param, Path(folder))


def holding(case: TransportCase, buffer: FixedBuffer) -> AbstractContextManager[HolderServer]:
    return serving(buffer, transport=case.transport, host=case.host)


@pytest.mark.parametrize("transfer_class", TransferClass)
@pytest.mark.parametrize(("num_bytes", "chunk_bytes"), [(100_000, 500), (12_345_678, 4 << 20), (3_000_000, 256 << 10)])
def test_a_pack_arrives_whole(
    case: TransportCase, num_bytes: int, chunk_bytes: int, transfer_class: TransferClass
) -> None:
    data, manifest = make_pack(num_bytes, chunk_bytes)
    pack_id = pack_id_of(manifest.encode())
    sink = PackSink(pack_id, data, manifest)
    with holding(case, FixedBuffer(pack_id, data, manifest)) as holder:
        chunks = range(manifest.num_chunks)
        source = source_at(holder.address, pack_id)
        stream = follow(
            pack_id, chunks, [source], sink, receiver(), FollowOptions(case.transport, transfer_class=transfer_class)
        )
        assert list(stream) == list(chunks)
        assert eventually(lambda: holder.num_streams == 0)
    assert sink.bytes_held == data


def test_chunks_come_as_they_become_ready(case: TransportCase) -> None:
    sent, sink = FixedBuffer(PACK_ID, DATA, MANIFEST, published=1), PackSink(PACK_ID, DATA, MANIFEST)
    with holding(case, sent) as holder:
        source = source_at(holder.address, PACK_ID)
        stream = follow(PACK_ID, ALL, [source], sink, receiver(), FollowOptions(case.transport))
        for index in ALL:
            sent.publish(index, sent.pieces[index])
            assert next(stream) == index
        assert list(stream) == []


def test_refusals_have_names(case: TransportCase) -> None:
    with holding(case, FixedBuffer(PACK_ID, DATA, MANIFEST)) as holder:
        with pytest.raises(TicketExpired):
            fetch_head(source_at(holder.address, PACK_ID, expires=1), receiver(), FollowOptions(case.transport))
        head = fetch_head(source_at(holder.address, PACK_ID), receiver(), FollowOptions(case.transport))
        assert head == MANIFEST.encode()


def test_a_silent_source_is_left_for_the_next(case: TransportCase) -> None:
    with TemporaryDirectory() as folder:
        other = TransportCase(case.transport, case.host if "shm:" not in case.host else f"shm:{folder}/other")
        with other.silent_listener() as silent, holding(case, FixedBuffer(PACK_ID, DATA, MANIFEST)) as holder:
            with pytest.raises(SourceStalled):
                fetch_head(source_at(silent, PACK_ID), receiver(), FollowOptions(case.transport, 0.3))
            sink = PackSink(PACK_ID, DATA, MANIFEST)
            sources = [source_at(silent, PACK_ID), source_at(holder.address, PACK_ID)]
            stream = follow(PACK_ID, ALL, sources, sink, receiver(), FollowOptions(case.transport, 0.5))
            assert sorted(stream) == list(ALL)
            assert sink.bytes_held == DATA


def test_a_holder_that_closes_ends_its_streams(case: TransportCase) -> None:
    with holding(case, FixedBuffer(PACK_ID, DATA, MANIFEST, published=1)) as holder:
        sink = PackSink(PACK_ID, DATA, MANIFEST)
        source = source_at(holder.address, PACK_ID)
        stream = follow(PACK_ID, ALL, [source], sink, receiver(), FollowOptions(case.transport, 1.0))
        assert next(stream) == 0
        begin = time.monotonic()
        holder.close()
        assert time.monotonic() - begin < 1.0
        with pytest.raises(SourcesExhausted):
            list(stream)


def test_a_follower_that_stops_leaves_its_holder(case: TransportCase) -> None:
    with holding(case, FixedBuffer(PACK_ID, DATA, MANIFEST, published=1)) as holder:
        source, stop = source_at(holder.address, PACK_ID), threading.Event()
        sink = PackSink(PACK_ID, DATA, MANIFEST)
        stream = follow(PACK_ID, ALL, [source], sink, receiver(), FollowOptions(case.transport), TransferControl(stop))
        assert next(stream) == 0
        stop.set()
        assert list(stream) == []
        assert eventually(lambda: holder.num_streams == 0)


def test_many_followers_at_once(case: TransportCase) -> None:
    sinks = [PackSink(PACK_ID, DATA, MANIFEST) for _ in range(16)]
    with holding(case, FixedBuffer(PACK_ID, DATA, MANIFEST)) as holder:
        source = source_at(holder.address, PACK_ID)

        def fill(sink: PackSink) -> None:
            list(follow(PACK_ID, ALL, [source], sink, receiver(), FollowOptions(case.transport)))

        threads = [threading.Thread(target=fill, args=(sink,)) for sink in sinks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert eventually(lambda: holder.num_streams == 0)
    assert all(sink.bytes_held == DATA for sink in sinks)
