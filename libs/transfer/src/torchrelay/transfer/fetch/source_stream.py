"""One source of a transfer, as the thread sees it that receives from it: a frame at a time."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from torchrelay.transfer.errors import ProtocolViolation
from torchrelay.transfer.fetch.chunk_assignment import ChunkRequests
from torchrelay.transfer.fetch.sources import SourceAddress
from torchrelay.transfer.fetch.statistics import TransferStats
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.protocol.frames import FrameHeader, FrameKind

if TYPE_CHECKING:
    from torchrelay.transfer.fetch.multi_source import MultiSourceFetch

PROGRESS_INTERVAL_S = 0.005  # bytes of a chunk are counted no more often


class SinkFailed(Exception):
    """The sink has raised ``cause``: no source is to blame."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SourceStream:
    """``step`` again and again, until it raises; then ``close``."""

    def __init__(self, fetch: MultiSourceFetch, number: int, source: SourceAddress) -> None:
        self.number, self.source = number, source
        self.asked: set[int] = set()  # what may come
        self._is_counted = False  # in the tally, as one that is followed
        self._fetch = fetch
        self._requests: deque[ChunkRequests] = deque()  # not told to the source yet
        self._request_lock = threading.Lock()
        self._upstream: Upstream | None = None
        self._class = fetch.transfer_class  # in which it was opened
        self._num_unreported_bytes = 0
        self._report_at = 0.0

    def step(self) -> None:
        """Opens the stream, or receives one frame. Raises the source's failures, ``Stopped`` and ``SinkFailed``."""
        if self._upstream is not None and self._class != self._fetch.transfer_class:
            self._reopen(self._upstream)
        if self._upstream is None:
            self._open()
            return
        header = self._upstream.frames.receive_header()
        if header.kind == FrameKind.CHUNK:
            self._receive_chunk(self._upstream, header)
        elif header.kind in (FrameKind.HAVE, FrameKind.GAINED):
            self._fetch.gained(self, self._upstream.gained(header))
        elif header.kind == FrameKind.ALIVE:
            self._upstream.frames.payload(header, 0)
            self._fetch.frame_received(self)
        else:
            raise ProtocolViolation(f"a {header.kind.name} frame came where chunks were due")

    def ask(self, requests: ChunkRequests) -> None:
        """Notes what ``tell`` is to tell the source; of several orders, the first noted is told first."""
        self.asked.update(requests.wanted)
        self._requests.append(requests)

    def send_requests(self) -> None:
        """Any thread may. A chunk taken back and wanted again must not be told the other way round."""
        while self._requests and self._upstream is not None:
            with (
                self._request_lock,
                suppress(IndexError, OSError),
            ):  # told meanwhile; gone, as the receiving thread finds out
                requests = self._requests.popleft()
                if self._upstream is not None:
                    self._upstream.ask(requests.wanted, requests.cancelled)

    def count(self, stats: TransferStats, *, followed: bool) -> None:
        """Lets the tally know whether the source is asked for chunks."""
        if followed != self._is_counted:
            (stats.joined if followed else stats.left)(self.source.holder_id)
            self._is_counted = followed

    def abort(self) -> None:
        """Any thread may; the stream's own finds its connection ended."""
        if (upstream := self._upstream) is not None:
            upstream.abort()

    def close(self) -> None:
        if self._upstream is not None:
            self._upstream.close()

    def _reopen(self, upstream: Upstream) -> None:
        """To open it anew, in the class that the transfer has by now."""
        self._fetch.reopening(self)
        with self._request_lock:
            self._upstream = None
            self.asked.clear()
            self._requests.clear()
        upstream.close()

    def _open(self) -> None:
        options, self._class = self._fetch.options, self._fetch.transfer_class
        upstream = Upstream.open(
            self.source,
            options.receiver,
            options.transport,
            options.stall_s,
            self._fetch.stop_signal,
            self._class,
            self._fetch.connect_s(),
            self._watch,
        )
        upstream.frames.stall_s = math.inf  # from now on the swarm knows whether anything is due
        self._upstream = upstream
        self._fetch.opened(self)
        self.step()  # what it has is told next, and what is asked of it depends on that

    def _receive_chunk(self, upstream: Upstream, header: FrameHeader) -> None:
        fetch, index = self._fetch, header.chunk
        if index not in self.asked:
            raise ProtocolViolation(f"chunk {index} was not asked for")
        if not fetch.begin(self, index):
            upstream.frames.skip(header.num_bytes)
            self._report_progress()
            return
        try:
            view, expected = fetch.sink.chunk(index), fetch.sink.digest(index)
        except Exception as error:
            raise SinkFailed(error) from error
        if upstream.receive_chunk(header, view, expected):
            try:
                fetch.sink.accept(index)
            except Exception as error:
                raise SinkFailed(error) from error
            num_unreported, self._num_unreported_bytes = self._num_unreported_bytes, 0
            fetch.accepted(self, index, len(view), num_unreported)

    def _watch(self, num_bytes: int) -> None:
        self._num_unreported_bytes += num_bytes
        if time.monotonic() >= self._report_at:
            self._report_progress()

    def _report_progress(self) -> None:
        now = time.monotonic()
        self._report_at = now + PROGRESS_INTERVAL_S
        num_bytes, self._num_unreported_bytes = self._num_unreported_bytes, 0
        self._fetch.progress(self, num_bytes, now)
