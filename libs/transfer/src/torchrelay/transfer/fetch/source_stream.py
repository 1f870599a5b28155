"""The stream of a transfer's source, received frame by frame."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from torchrelay.transfer.buffers import Sink
from torchrelay.transfer.errors import ProtocolViolation
from torchrelay.transfer.fetch.chunk_assignment import ChunkRequests
from torchrelay.transfer.fetch.sources import SourceAddress
from torchrelay.transfer.fetch.statistics import TransferStats
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.protocol.frames import FrameHeader, FrameKind
from torchrelay.transfer.transport.interface import TransferClass

PROGRESS_INTERVAL_S = 0.005  # received bytes of a chunk are reported no more often


class SinkFailed(Exception):
    """The sink raised ``cause``; no source is to blame."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class StreamOwner(Protocol):
    """The transfer of a stream. Each stream calls from its own thread."""

    @property
    def transfer_class(self) -> TransferClass: ...

    def connect(self, source: SourceAddress, watch: Callable[[int], None]) -> Upstream: ...

    def opened(self, stream: SourceStream) -> None:
        """Raises ``StopRequested`` when the transfer is over."""

    def reopening(self, stream: SourceStream) -> None:
        """The stream is about to replace its connection."""

    def gained(self, stream: SourceStream, indices: Sequence[int]) -> None:
        """The source has these chunks."""

    def frame_received(self, stream: SourceStream) -> None: ...

    def begin(self, stream: SourceStream, index: int) -> bool:
        """A chunk starts to arrive. False: skip it."""

    def progress(self, stream: SourceStream, num_bytes: int, now: float) -> None:
        """Bytes were received, or a tick has passed. Raises ``SourceStalled`` and ``ChunkRevoked``."""

    def accepted(self, stream: SourceStream, index: int, num_bytes: int, num_unreported_bytes: int) -> None:
        """A chunk is verified and in the sink. ``num_unreported_bytes`` of it were not reported as progress."""


class SourceStream:
    """A stream: call ``step`` until it raises, then ``close``."""

    def __init__(self, owner: StreamOwner, sink: Sink, number: int, source: SourceAddress) -> None:
        self.number, self.source = number, source
        self._owner, self._sink = owner, sink
        self._asked: set[int] = set()  # chunks that may arrive
        self._is_counted = False  # in the statistics as a followed source
        self._requests: deque[ChunkRequests] = deque()  # not sent yet
        self._request_lock = threading.Lock()
        self._upstream: Upstream | None = None
        self._num_unreported_bytes = 0
        self._report_at = 0.0

    def step(self) -> None:
        """Opens the stream, or receives a frame. Raises the source's errors, ``StopRequested``, ``SinkFailed``."""
        if self._upstream is not None and self._upstream.transfer_class != self._owner.transfer_class:
            self._reopen(self._upstream)
        if self._upstream is None:
            self._open()
            return
        header = self._upstream.frames.receive_header()
        if header.kind == FrameKind.CHUNK:
            self._receive_chunk(self._upstream, header)
        elif header.kind in (FrameKind.HAVE, FrameKind.GAINED):
            self._owner.gained(self, self._upstream.gained(header))
        elif header.kind == FrameKind.ALIVE:
            self._upstream.frames.payload(header, 0)
            self._owner.frame_received(self)
        else:
            raise ProtocolViolation(f"unexpected {header.kind.name} frame while receiving chunks")

    def ask(self, requests: ChunkRequests) -> None:
        """Queues requests for ``send_requests``."""
        self._asked.update(requests.wanted)
        self._requests.append(requests)

    def send_requests(self) -> None:
        """Sends the queued requests in order, from any thread: a chunk may be cancelled and then requested again."""
        while self._requests and self._upstream is not None:
            # IndexError: another thread has sent them. OSError: the receiving thread will find the connection broken.
            with self._request_lock, suppress(IndexError, OSError):
                requests = self._requests.popleft()
                if self._upstream is not None:
                    self._upstream.ask(requests.wanted, requests.cancelled)

    def count(self, stats: TransferStats, *, followed: bool) -> None:
        """Records in the statistics whether the source is followed."""
        if followed != self._is_counted:
            (stats.joined if followed else stats.left)(self.source.holder_id)
            self._is_counted = followed

    def abort(self) -> None:
        """Ends the connection under the receiving thread, from any thread."""
        if (upstream := self._upstream) is not None:
            upstream.abort()

    def close(self) -> None:
        if self._upstream is not None:
            self._upstream.close()

    def _reopen(self, upstream: Upstream) -> None:
        """Drops the connection; the next step opens a new one in the transfer's current class."""
        self._owner.reopening(self)
        with self._request_lock:
            self._upstream = None
            self._asked.clear()
            self._requests.clear()
        upstream.close()

    def _open(self) -> None:
        upstream = self._owner.connect(self.source, self._watch)
        upstream.frames.stall_s = math.inf  # from now on the policy limits silence
        self._upstream = upstream
        self._owner.opened(self)
        self.step()  # the source announces its chunks next, on which the requests depend

    def _receive_chunk(self, upstream: Upstream, header: FrameHeader) -> None:
        owner, sink, index = self._owner, self._sink, header.chunk
        if index not in self._asked:
            raise ProtocolViolation(f"chunk {index} was not requested")
        if not owner.begin(self, index):
            upstream.frames.skip(header.num_bytes)
            self._report_progress()
            return
        try:
            view, expected = sink.chunk(index), sink.digest(index)
        except Exception as error:
            raise SinkFailed(error) from error
        if upstream.receive_chunk(header, view, expected):
            try:
                sink.accept(index)
            except Exception as error:
                raise SinkFailed(error) from error
            num_unreported, self._num_unreported_bytes = self._num_unreported_bytes, 0
            owner.accepted(self, index, len(view), num_unreported)

    def _watch(self, num_bytes: int) -> None:
        self._num_unreported_bytes += num_bytes
        if time.monotonic() >= self._report_at:
            self._report_progress()

    def _report_progress(self) -> None:
        now = time.monotonic()
        self._report_at = now + PROGRESS_INTERVAL_S
        num_bytes, self._num_unreported_bytes = self._num_unreported_bytes, 0
        self._owner.progress(self, num_bytes, now)
