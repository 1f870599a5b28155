"""The stream of a source: the order in which requests are sent to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.support.wait import HANG_S
from tests.unit.transfer.loopback_holders import (
    SamplePack,
    receiver,
    serving,
)
from torchrelay.transfer.fetch.chunk_assignment import ChunkRequests
from torchrelay.transfer.fetch.multi_source import MultiSourceFetch
from torchrelay.transfer.fetch.options import FollowOptions, TransferControl
from torchrelay.transfer.fetch.source_stream import SourceStream
from torchrelay.transfer.fetch.sources import SourceAddress
from torchrelay.transfer.fetch.upstream import Upstream


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
