"""One source of a transfer: in which order it is told what it is to send."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.unit.transfer.relay_parts import PackSink, eventually, make_pack, receiver, source_at
from torchrelay.transfer.chunks import Orders
from torchrelay.transfer.following import Following
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.stream import Stream
from torchrelay.transfer.swarm import Rules
from torchrelay.transfer.tcp import TcpTransport
from torchrelay.transfer.terms import Terms
from torchrelay.transfer.transport import TransferClass
from torchrelay.transfer.upstream import Upstream


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
    terms = Terms(pack_id, receiver(), TcpTransport(), Rules(), TransferClass.KV, 5.0, 5.0)
    source = source_at("127.0.0.1:1", pack_id, "host-1")
    following = Following(terms, [0], [source], PackSink(pack_id, data, manifest), None)
    stream, upstream = Stream(following, 0, source), SlowUpstream()
    stream._upstream = upstream
    stream.ask(Orders([], [0]))
    first = threading.Thread(target=stream.tell)
    first.start()
    assert upstream.begun.wait(10)
    stream.ask(Orders([0], []))
    second = threading.Thread(target=stream.tell)
    second.start()
    assert not eventually(lambda: bool(upstream.told), 0.2)
    upstream.going_on.set()
    first.join()
    second.join()
    assert upstream.told == [([], [0]), ([0], [])]
