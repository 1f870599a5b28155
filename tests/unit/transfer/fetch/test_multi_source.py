"""``follow`` from several holders over real sockets: striping, slow sources, cycles, new sources, and resuming."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.wait import HANG_S, wait_until
from tests.unit.transfer.loopback_holders import PackSink, SamplePack, serving, tampering_proxy
from torchrelay.transfer.errors import BufferLost, SourcesExhausted
from torchrelay.transfer.fetch import source_state
from torchrelay.transfer.fetch.follow import TransferControl
from torchrelay.transfer.fetch.sources import SourceAddress, SourceUpdates
from torchrelay.transfer.fetch.statistics import TransferStats
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.interface import TransferClass
from torchrelay.transfer.transport.tcp import TcpConnection

PACK = SamplePack(4 << 20, chunk_bytes=32768)
ALL = list(PACK.chunks)


@pytest.fixture
def never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that a busy machine delays is not taken for a silent one."""
    for name in ("OPEN_TIMEOUT_S", "MIN_SILENCE_S", "MAX_SILENCE_S"):
        monkeypatch.setattr(source_state, name, HANG_S)


@contextmanager
def two_holders() -> Iterator[tuple[HolderServer, HolderServer]]:
    with serving(PACK.buffer(), holder_id="host-1") as host1, serving(PACK.buffer(), holder_id="host-2") as host2:
        yield host1, host2


def waiting_for(other: Callable[[], int], num_bytes: int) -> Callable[[bytes, int], bytes]:
    """For a proxy: passes its first ``num_bytes``, the rest only once the other source has delivered as many."""

    def tamper(data: bytes, offset: int) -> bytes:
        if offset > num_bytes:
            wait_until(lambda: other() >= num_bytes, "delivery by the other source")
        return data

    return tamper


@contextmanager
def two_striped_sources() -> Iterator[tuple[list[SourceAddress], list[HolderServer]]]:
    """Two sources, each of which delivers its second MiB only after the other has sent its first."""
    with (
        two_holders() as (host1, host2),
        tampering_proxy(host1.address, waiting_for(lambda: host2.bytes_sent, 1 << 20)) as proxy1,
        tampering_proxy(host2.address, waiting_for(lambda: host1.bytes_sent, 1 << 20)) as proxy2,
    ):
        yield [PACK.source(proxy1, "host-1"), PACK.source(proxy2, "host-2")], [host1, host2]


@contextmanager
def slow_source_and_helper(helps: threading.Event) -> Iterator[tuple[list[SourceAddress], HolderServer]]:
    """A source that turns slow at half of the pack and stays slow until its helper has sent a tenth.

    The helper delivers nothing before ``helps`` is set.
    """

    def slow_down(data: bytes, offset: int) -> bytes:
        if offset < 2 << 20:
            time.sleep(len(data) / 5e6)
        elif host2.bytes_sent < len(PACK.data) // 10:
            helps.set()
            time.sleep(len(data) / 0.4e6)
        return data

    def wait_for_help(data: bytes, _offset: int) -> bytes:
        assert helps.wait(HANG_S)
        return data

    with (
        two_holders() as (host1, host2),
        tampering_proxy(host1.address, slow_down) as proxy1,
        tampering_proxy(host2.address, wait_for_help) as proxy2,
    ):
        yield [PACK.source(proxy1, "host-1"), PACK.source(proxy2, "host-2")], host2


def brought(stats: TransferStats) -> dict[str, int]:
    return {share.holder_id: share.num_bytes for share in stats.by_source()}


def test_striped_sources_deliver_disjoint_chunks_at_once() -> None:
    sink, stats = PACK.sink(), TransferStats()
    with two_striped_sources() as (sources, holders):
        stream = PACK.follow(sources, sink, control=TransferControl(stats=stats), num_striped=2)
        assert sorted(stream) == ALL
        assert min(holder.bytes_sent for holder in holders) >= 1 << 20
    assert sink.bytes_held == PACK.data
    assert sorted(sink.accepted) == ALL
    assert sum(brought(stats).values()) == len(PACK.data)
    assert min(brought(stats).values()) > 0


def test_slow_source_gets_helper_and_continues() -> None:
    sink, stats = PACK.sink(), TransferStats()
    with slow_source_and_helper(threading.Event()) as (sources, _):
        assert sorted(PACK.follow(sources, sink, control=TransferControl(stats=stats))) == ALL
    assert sink.bytes_held == PACK.data
    assert sorted(sink.accepted) == ALL
    first, second = stats.by_source()
    assert first.num_bytes > len(PACK.data) // 3
    assert second.num_bytes > len(PACK.data) // 20
    assert stats.num_repairs >= 1
    assert first.error == ""


def test_source_added_midway_becomes_alternate() -> None:
    sink, stats, updates = PACK.sink(), TransferStats(), SourceUpdates()
    with (
        serving(PACK.buffer(4), holder_id="host-1") as host1,
        serving(PACK.buffer(), holder_id="host-2") as host2,
    ):
        control = TransferControl(updates=updates, stats=stats)
        following = PACK.follow([PACK.source(host1.address, "host-1")], sink, control=control)
        assert [next(following) for _ in range(4)] == ALL[:4]
        updates.add([PACK.source(host2.address, "host-2")])
        assert sorted(following) == ALL[4:]
    assert sink.bytes_held == PACK.data
    assert {holder_id for holder_id, num_bytes in brought(stats).items() if num_bytes} == {"host-1", "host-2"}


@pytest.mark.usefixtures("never_silent")
def test_running_transfer_becomes_striped() -> None:
    sink, stats, updates = PACK.sink(), TransferStats(), SourceUpdates()
    with two_striped_sources() as (sources, holders):
        control = TransferControl(updates=updates, stats=stats)
        following = PACK.follow(sources[:1], sink, control=control)
        assert next(following) == 0
        updates.add(sources[1:], num_striped=2)
        assert sorted(following) == ALL[1:]
        assert min(holder.bytes_sent for holder in holders) >= 1 << 20
    assert min(brought(stats).values()) > 0
    assert stats.num_repairs == 0


def test_idle_transfer_turned_urgent_gets_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, stats, updates = PACK.sink(), TransferStats(), SourceUpdates()
    classes: list[TransferClass] = []
    monkeypatch.setattr(TcpConnection, "set_class", lambda _, transfer_class: classes.append(transfer_class))
    with slow_source_and_helper(threading.Event()) as (sources, helper):
        control = TransferControl(updates=updates, stats=stats)
        following = PACK.follow(sources, sink, control=control, transfer_class=TransferClass.IDLE)
        assert next(following) == 0
        assert classes == [TransferClass.IDLE]
        updates.add(transfer_class=TransferClass.URGENT)
        assert sorted(following) == ALL[1:]
        assert helper.bytes_sent >= len(PACK.data) // 10  # no helper joins an idle transfer for a slow source
    assert sink.bytes_held == PACK.data and sorted(sink.accepted) == ALL
    assert classes[1:] and set(classes[1:]) == {TransferClass.URGENT}
    assert {share.error for share in stats.by_source()} == {""}


def test_refused_source_rejoins_with_new_ticket() -> None:
    sink, updates, stats = PACK.sink(), SourceUpdates(), TransferStats()
    with (
        serving(PACK.buffer(), holder_id="host-1") as host1,
        serving(PACK.buffer(0), holder_id="host-2") as host2,
    ):

        def renew_ticket() -> None:
            wait_until(lambda: any("expired" in share.error for share in stats.by_source()))
            updates.add([PACK.source(host1.address, "host-1")])

        expired = PACK.source(host1.address, "host-1", expires=1)
        renewing = threading.Thread(target=renew_ticket)
        renewing.start()
        control = TransferControl(updates=updates, stats=stats)
        sources = [expired, PACK.source(host2.address, "host-2")]
        assert sorted(PACK.follow(sources, sink, control=control, num_striped=2)) == ALL
        renewing.join()
    assert sink.bytes_held == PACK.data


def test_chunks_missing_at_one_source_come_from_other() -> None:
    sink, partial = PACK.sink(), PACK.buffer(0)
    partial.show(*ALL[::2])
    with serving(partial, holder_id="host-1") as host1, serving(PACK.buffer(), holder_id="host-2") as host2:
        sources = [PACK.source(host1.address, "host-1"), PACK.source(host2.address, "host-2")]
        assert sorted(PACK.follow(sources, sink, num_striped=2)) == ALL
    assert sink.bytes_held == PACK.data


def test_copies_in_cycle_fill_each_other() -> None:
    """Each copy has the chunks that the other lacks, except one that only the alternate of one copy has."""
    sinks = [PACK.sink(), PACK.sink()]
    missing = []
    for number, sink in enumerate(sinks):
        sink.show(*ALL[number:-1:2])
        missing.append([index for index in ALL if index not in ALL[number:-1:2]])
    with ExitStack() as stack:
        hosts = [stack.enter_context(serving(sink, holder_id=f"host-{n}")) for n, sink in enumerate(sinks)]
        whole = stack.enter_context(serving(PACK.buffer(), holder_id="host-w"))

        def fill(number: int) -> None:
            other, own_id = 1 - number, f"host-{number}"
            sources = [PACK.source(hosts[other].address, f"host-{other}", own_id)]
            if number == 0:
                sources.append(PACK.source(whole.address, "host-w", "host-0"))
            list(PACK.follow(sources, sinks[number], missing[number], own_id))

        threads = [threading.Thread(target=fill, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        wait_until(lambda: whole.bytes_sent == len(sinks[0].pieces[-1]))
    assert all(sink.bytes_held == PACK.data for sink in sinks)


def test_restarted_holder_sends_only_missing_chunks() -> None:
    sink = PACK.sink()
    with serving(PACK.buffer(50)) as holder:
        stream = PACK.follow([PACK.source(holder.address)], sink)
        assert [next(stream) for _ in range(50)] == ALL[:50]
    with pytest.raises(SourcesExhausted):
        next(stream)
    with serving(PACK.buffer()) as again:
        missing = [index for index in ALL if index not in sink.accepted]
        assert list(PACK.follow([PACK.source(again.address)], sink, missing)) == missing
        wait_until(lambda: again.bytes_sent == len(PACK.data) - 50 * 32768)
    assert sink.bytes_held == PACK.data


def test_follow_serves_every_transfer_class() -> None:
    with serving(PACK.buffer()) as holder:
        for transfer_class in TransferClass:
            chunk, source = [int(transfer_class)], PACK.source(holder.address)
            assert list(PACK.follow([source], PACK.sink(), chunk, transfer_class=transfer_class)) == chunk


def test_sink_error_in_other_thread_ends_transfer() -> None:
    class FullSink(PackSink):
        def accept(self, index: int) -> None:
            if index >= 40:
                raise BufferLost("dropped meanwhile")
            super().accept(index)

    with two_holders() as (host1, host2):
        sources = [PACK.source(host1.address, "host-1"), PACK.source(host2.address, "host-2")]
        with pytest.raises(BufferLost, match="dropped meanwhile"):
            list(PACK.follow(sources, FullSink(PACK), num_striped=2))
        wait_until(lambda: host1.num_streams == host2.num_streams == 0)
