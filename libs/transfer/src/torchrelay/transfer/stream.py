"""One source of a transfer, as the thread sees it that receives from it: a frame at a time."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from torchrelay.transfer.chunks import Orders
from torchrelay.transfer.errors import ProtocolViolation
from torchrelay.transfer.shares import Tally
from torchrelay.transfer.sources import SourceAddress
from torchrelay.transfer.upstream import Upstream
from torchrelay.transfer.wire import FrameHeader, FrameKind

if TYPE_CHECKING:
    from torchrelay.transfer.following import Following

NOTE_S = 0.005  # bytes of a chunk are counted no more often


class SinkFailed(Exception):
    """The sink has raised ``cause``: no source is to blame."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Stream:
    """``step`` again and again, until it raises; then ``close``."""

    def __init__(self, following: Following, number: int, source: SourceAddress) -> None:
        self.number, self.source = number, source
        self.asked: set[int] = set()  # what may come
        self._is_counted = False  # in the tally, as one that is followed
        self._following = following
        self._orders: deque[Orders] = deque()  # not told to the source yet
        self._telling = threading.Lock()
        self._upstream: Upstream | None = None
        self._class = following.transfer_class  # in which it was opened
        self._num_unnoted_bytes = 0
        self._note_at = 0.0

    def step(self) -> None:
        """Opens the stream, or receives one frame. Raises the source's failures, ``Stopped`` and ``SinkFailed``."""
        if self._upstream is not None and self._class != self._following.transfer_class:
            self._leave(self._upstream)
        if self._upstream is None:
            self._open()
            return
        header = self._upstream.frames.receive_header()
        if header.kind == FrameKind.CHUNK:
            self._receive_chunk(self._upstream, header)
        elif header.kind in (FrameKind.HAVE, FrameKind.GAINED):
            self._following.gained(self, self._upstream.gained(header))
        elif header.kind == FrameKind.ALIVE:
            self._upstream.frames.payload(header, 0)
            self._following.heard(self)
        else:
            raise ProtocolViolation(f"a {header.kind.name} frame came where chunks were due")

    def ask(self, orders: Orders) -> None:
        """Notes what ``tell`` is to tell the source; of several orders, the first noted is told first."""
        self.asked.update(orders.wanted)
        self._orders.append(orders)

    def tell(self) -> None:
        """Any thread may. A chunk taken back and wanted again must not be told the other way round."""
        while self._orders and self._upstream is not None:
            with (
                self._telling,
                suppress(IndexError, OSError),
            ):  # told meanwhile; gone, as the receiving thread finds out
                orders = self._orders.popleft()
                if self._upstream is not None:
                    self._upstream.ask(orders.wanted, orders.cancelled)

    def count(self, tally: Tally, *, followed: bool) -> None:
        """Lets the tally know whether the source is asked for chunks."""
        if followed != self._is_counted:
            (tally.joined if followed else tally.left)(self.source.holder_id)
            self._is_counted = followed

    def abort(self) -> None:
        """Any thread may; the stream's own finds its connection ended."""
        if (upstream := self._upstream) is not None:
            upstream.abort()

    def close(self) -> None:
        if self._upstream is not None:
            self._upstream.close()

    def _leave(self, upstream: Upstream) -> None:
        """To open it anew, in the class that the transfer has by now."""
        self._following.reopening(self)
        with self._telling:
            self._upstream = None
            self.asked.clear()
            self._orders.clear()
        upstream.close()

    def _open(self) -> None:
        terms, self._class = self._following.terms, self._following.transfer_class
        upstream = Upstream.open(
            self.source,
            terms.receiver,
            terms.transport,
            terms.stall_s,
            self._following.ending,
            self._class,
            self._following.connect_s(),
            self._watch,
        )
        upstream.frames.stall_s = math.inf  # from now on the swarm knows whether anything is due
        self._upstream = upstream
        self._following.opened(self)
        self.step()  # what it has is told next, and what is asked of it depends on that

    def _receive_chunk(self, upstream: Upstream, header: FrameHeader) -> None:
        following, index = self._following, header.chunk
        if index not in self.asked:
            raise ProtocolViolation(f"chunk {index} was not asked for")
        if not following.begin(self, index):
            upstream.frames.skip(header.num_bytes)
            self._note()
            return
        try:
            view, expected = following.sink.chunk(index), following.sink.digest(index)
        except Exception as error:
            raise SinkFailed(error) from error
        if upstream.receive_chunk(header, view, expected):
            try:
                following.sink.accept(index)
            except Exception as error:
                raise SinkFailed(error) from error
            num_unnoted, self._num_unnoted_bytes = self._num_unnoted_bytes, 0
            following.accepted(self, index, len(view), num_unnoted)

    def _watch(self, num_bytes: int) -> None:
        self._num_unnoted_bytes += num_bytes
        if time.monotonic() >= self._note_at:
            self._note()

    def _note(self) -> None:
        now = time.monotonic()
        self._note_at = now + NOTE_S
        num_bytes, self._num_unnoted_bytes = self._num_unnoted_bytes, 0
        self._following.progress(self, num_bytes, now)
