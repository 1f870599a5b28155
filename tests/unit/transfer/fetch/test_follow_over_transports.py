"""``follow`` and its holder over every transport: packs large and small, refusals, silence, ends, many at once."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import pytest

from tests.support.wait import wait_until
from tests.unit.transfer.loopback_holders import FixedBuffer, SamplePack, receiver, serving
from tests.unit.transfer.transport.transport_cases import TransportCase
from torchrelay.transfer.errors import SourcesExhausted, SourceStalled
from torchrelay.transfer.fetch.follow import FollowOptions, TransferControl, fetch_head
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.interface import TransferClass

PACK = SamplePack(100_000)
ALL = list(PACK.chunks)


@pytest.fixture
def case() -> TransportCase:
    return TransportCase()


def holding(case: TransportCase, buffer: FixedBuffer) -> AbstractContextManager[HolderServer]:
    return serving(buffer, transport=case.transport, host=case.host)


@pytest.mark.parametrize("transfer_class", TransferClass)
@pytest.mark.parametrize(("num_bytes", "chunk_bytes"), [(100_000, 500), (12_345_678, 4 << 20), (3_000_000, 256 << 10)])
def test_pack_arrives_complete(
    case: TransportCase, num_bytes: int, chunk_bytes: int, transfer_class: TransferClass
) -> None:
    pack = SamplePack(num_bytes, chunk_bytes)
    sink = pack.sink()
    with holding(case, pack.buffer()) as holder:
        sources = [pack.source(holder.address)]
        stream = pack.follow(sources, sink, transport=case.transport, transfer_class=transfer_class)
        assert list(stream) == list(pack.chunks)
        wait_until(lambda: holder.num_streams == 0)
    assert sink.bytes_held == pack.data


def test_chunks_arrive_as_they_become_ready(case: TransportCase) -> None:
    sent = PACK.buffer(1)
    with holding(case, sent) as holder:
        stream = PACK.follow([PACK.source(holder.address)], PACK.sink(), transport=case.transport)
        for index in ALL:
            sent.show(index)
            assert next(stream) == index
        assert list(stream) == []


def test_silent_source_replaced(case: TransportCase) -> None:
    with case.silent_listener() as silent, holding(case, PACK.buffer()) as holder:
        with pytest.raises(SourceStalled):
            fetch_head(PACK.source(silent), receiver(), FollowOptions(case.transport, 0.3))
        sink = PACK.sink()
        sources = [PACK.source(silent), PACK.source(holder.address)]
        assert sorted(PACK.follow(sources, sink, transport=case.transport, stall_s=0.5)) == ALL
        assert sink.bytes_held == PACK.data


def test_closed_holder_ends_its_streams(case: TransportCase) -> None:
    with holding(case, PACK.buffer(1)) as holder:
        stream = PACK.follow([PACK.source(holder.address)], PACK.sink(), transport=case.transport)
        assert next(stream) == 0
        holder.close()
        assert holder.num_streams == 0
        with pytest.raises(SourcesExhausted):
            list(stream)


def test_stopped_follower_frees_its_stream(case: TransportCase) -> None:
    with holding(case, PACK.buffer(1)) as holder:
        sources, stop = [PACK.source(holder.address)], threading.Event()
        stream = PACK.follow(sources, PACK.sink(), control=TransferControl(stop), transport=case.transport)
        assert next(stream) == 0
        stop.set()
        assert list(stream) == []
        wait_until(lambda: holder.num_streams == 0)


def test_many_followers_at_once(case: TransportCase) -> None:
    sinks = [PACK.sink() for _ in range(16)]
    with holding(case, PACK.buffer()) as holder:
        sources = [PACK.source(holder.address)]
        threads = [
            threading.Thread(target=lambda sink=sink: list(PACK.follow(sources, sink, transport=case.transport)))
            for sink in sinks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: holder.num_streams == 0 and holder.bytes_sent == len(sinks) * len(PACK.data))
    assert all(sink.bytes_held == PACK.data for sink in sinks)
