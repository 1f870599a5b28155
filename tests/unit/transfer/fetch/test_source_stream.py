"""One source of a transfer: in which order it is told what it is to send."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.unit.transfer.loopback_holders import PackSink, eventually, make_pack, receiver, source_at
from torchrelay.transfer.fetch.chunk_assignment import ChunkRequests
from torchrelay.transfer.fetch.multi_source import MultiSourceFetch
from torchrelay.transfer.fetch.options import FollowOptions
from torchrelay.transfer.fetch.source_policy import SourceRules
from torchrelay.transfer.fetch.source_stream import SourceStream
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.transport.interface import TransferClass
from torchrelay.transfer.transport.tcp import TcpTransport


class SlowUpstream(Upstream):
    """Takes its time over the first thing it is told."""

    def __init__(self) -> None:
        self.begun, self.going_on = threading.Event(), threading.Event()
        self.told: list[tuple[list[int], list[int]]] = []

    def ask(self, wanted: Sequence[int], cancelled: Sequence[int] = ()) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.going_on.wait(10)
        self.told.append((list(wanted), list(cancelled)))


def test_what_is_taken_back_and_wanted_again_is_told_in_this_order() -> None:
    data, manifest = make_pack(1 << 20)
    pack_id = pack_id_of(manifest.encode())
    terms = FollowOptions(pack_id, receiver(), TcpTransport(), SourceRules(), TransferClass.KV, 5.0, 5.0)
    source = source_at("127.0.0.1:1", pack_id, "host-1")
    fetch = MultiSourceFetch(terms, [0], [source], PackSink(pack_id, data, manifest), None)
    stream, upstream = SourceStream(fetch, 0, source), SlowUpstream()
    stream._upstream = upstream
    stream.ask(ChunkRequests([], [0]))
    first = threading.Thread(target=stream.send_requests)
    first.start()
    assert upstream.begun.wait(10)
    stream.ask(ChunkRequests([0], []))
    second = threading.Thread(target=stream.send_requests)
    second.start()
    assert not eventually(lambda: bool(upstream.told), 0.2)
    upstream.going_on.set()
    first.join()
    second.join()
    assert upstream.told == [([], [0]), ([0], [])]
