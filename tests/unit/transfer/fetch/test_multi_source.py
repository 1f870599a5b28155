"""follow from several holders over real sockets: striping, slow sources, cycles, new sources, and resuming."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.wait import HANG_S, wait_until
from tests.unit.transfer.loopback_holders import PackSink, SamplePack, receiver, serving, tampering_proxy
from torchrelay.transfer.errors import BufferLost
from torchrelay.transfer.fetch import source_state
from torchrelay.transfer.fetch.chunk_assignment import ChunkRequests
from torchrelay.transfer.fetch.follow import TransferControl
from torchrelay.transfer.fetch.multi_source import MultiSourceFetch
from torchrelay.transfer.fetch.options import FollowOptions
from torchrelay.transfer.fetch.rates import RateMonitor
from torchrelay.transfer.fetch.source_policy import SourcePolicy
from torchrelay.transfer.fetch.source_stream import SourceStream
from torchrelay.transfer.fetch.sources import SourceAddress, SourceUpdates
from torchrelay.transfer.fetch.statistics import TransferStats
from torchrelay.transfer.fetch.upstream import Upstream
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


def waiting_for(
    other: Callable[[], int], num_bytes: int, num_other_bytes: int | None = None
) -> Callable[[bytes, int], bytes]:
    """For a proxy: passes its first ``num_bytes``, the rest once the other source has delivered as many, or these."""

    def tamper(data: bytes, offset: int) -> bytes:
        if offset > num_bytes:
            wait_until(lambda: other() >= (num_other_bytes or num_bytes), "delivery by the other source")
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


def test_source_added_midway_becomes_alternate() -> None:
    sink, stats, updates = PACK.sink(), TransferStats(), SourceUpdates()
    with serving(PACK.buffer(4), holder_id="host-1") as host1, serving(PACK.buffer(), holder_id="host-2") as host2:
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


@pytest.mark.usefixtures("never_silent")
def test_idle_transfer_turned_urgent_gets_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that delivers half of the pack, and the rest once its helper has delivered as much as a tenth."""
    sink, stats, updates = PACK.sink(), TransferStats(), SourceUpdates()
    classes: list[TransferClass] = []
    monkeypatch.setattr(TcpConnection, "set_class", lambda _, transfer_class: classes.append(transfer_class))
    monkeypatch.setattr(RateMonitor, "slow", property(lambda _: True, lambda _, value: None))
    monkeypatch.setattr(SourcePolicy, "_throughput_dropped", lambda _: True)
    with (
        two_holders() as (host1, host2),
        tampering_proxy(host1.address, waiting_for(lambda: host2.bytes_sent, 2 << 20, len(PACK.data) // 10)) as proxy,
    ):
        control = TransferControl(updates=updates, stats=stats)
        sources = [PACK.source(proxy, "host-1"), PACK.source(host2.address, "host-2")]
        following = PACK.follow(sources, sink, control=control, transfer_class=TransferClass.IDLE)
        first = [next(following) for _ in range(20)]
        assert classes == [TransferClass.IDLE] and host2.bytes_sent == 0, "no helper joins an idle transfer"
        updates.add(transfer_class=TransferClass.URGENT)
        assert sorted([*first, *following]) == ALL
        assert host2.bytes_sent >= len(PACK.data) // 10
    assert sink.bytes_held == PACK.data and sorted(sink.accepted) == ALL
    assert classes[1:] and set(classes[1:]) == {TransferClass.URGENT}
    assert {share.error for share in stats.by_source()} == {""}


def test_refused_source_rejoins_with_new_ticket() -> None:
    sink, updates, stats = PACK.sink(), SourceUpdates(), TransferStats()
    with serving(PACK.buffer(), holder_id="host-1") as host1, serving(PACK.buffer(0), holder_id="host-2") as host2:

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


class SlowUpstream(Upstream):
    """Blocks on the first request; sends none of them."""

    def __init__(self, upstream: Upstream) -> None:
        super().__init__(upstream.frames, upstream.head, upstream.transfer_class)
        self.begun, self.resume = threading.Event(), threading.Event()
        self.sent: list[tuple[list[int], list[int]]] = []

    def ask(self, wanted: Sequence[int], cancelled: Sequence[int] = ()) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.resume.wait(HANG_S)
        self.sent.append((list(wanted), list(cancelled)))


class QuietFetch(MultiSourceFetch):
    """Opens a ``SlowUpstream``, and requests nothing by itself."""

    upstream: SlowUpstream

    def connect(self, source: SourceAddress, watch: Callable[[int], None]) -> Upstream:
        self.upstream = SlowUpstream(super().connect(source, watch))
        return self.upstream

    def gained(self, stream: SourceStream, indices: Sequence[int]) -> None:
        assert list(indices) == list(range(16))


def test_cancellation_sent_before_later_request_for_chunk() -> None:
    pack = SamplePack(16 * 4096)
    sink = pack.sink()
    with serving(pack.buffer()) as holder:
        source = pack.source(holder.address)
        fetch = QuietFetch(pack.pack_id, [0], [source], sink, receiver(), FollowOptions(), TransferControl())
        stream = SourceStream(fetch, sink, 0, source)
        stream.step()
        upstream = fetch.upstream
        stream.ask(ChunkRequests([], [0]))
        first = threading.Thread(target=stream.send_requests)
        first.start()
        assert upstream.begun.wait(HANG_S)
        stream.ask(ChunkRequests([0], []))
        second = threading.Thread(target=stream.send_requests)
        second.start()
        second.join(0.2)  # it must wait for the first
        assert second.is_alive() and not upstream.sent
        upstream.resume.set()
        first.join()
        second.join()
        stream.close()
    assert upstream.sent == [([], [0]), ([0], [])]
