"""A running transfer: the threads that carry out the decisions of ``SourcePolicy`` and ``ChunkAssignment``.

The iterating thread receives from the first source itself, so with one source no chunk changes threads; every further
source has its own thread. All receive straight into the sink. After each received part or tick, a thread has the policy
review the sources, opens the sources that join, and sends requests, also to the sources of other threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from torchrelay.common.errors import NotFound, PermissionDenied, TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.buffers import Sink
from torchrelay.transfer.errors import BufferLost, ChunkDamaged, SourcesExhausted, SourceStalled
from torchrelay.transfer.fetch.chunk_assignment import ChunkAssignment, ChunkRequests
from torchrelay.transfer.fetch.options import FollowOptions, StopSignal, TransferControl
from torchrelay.transfer.fetch.source_policy import SourcePolicy
from torchrelay.transfer.fetch.source_state import SourceState
from torchrelay.transfer.fetch.source_stream import SinkFailed, SourceStream
from torchrelay.transfer.fetch.sources import Receiver, SourceAddress
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.protocol.frame_stream import ChunkRevoked, StopRequested
from torchrelay.transfer.transport.interface import TICK_S, TransferClass

REVIEW_INTERVAL_S = 0.02
CONNECT_TIMEOUT_S = 0.5  # while another source may deliver
_SOURCE_FAILURES = (TorchrelayError, OSError)
log = get_logger(__name__)


class MultiSourceFetch:
    """A transfer: iterate over ``run``. The other public methods make it the ``StreamOwner`` of its streams."""

    def __init__(
        self,
        buffer_id: str,
        wanted: Sequence[int],
        sources: Sequence[SourceAddress],
        sink: Sink,
        receiver: Receiver,
        options: FollowOptions,
        control: TransferControl,
    ) -> None:
        self._buffer_id, self._sink, self._receiver = buffer_id, sink, receiver
        self._options, self._stats, self._updates = options, control.stats, control.updates
        self._stop = StopSignal(control.stop)
        self._wanted = wanted
        self._position = {index: position for position, index in enumerate(wanted)}
        self._sources = list(sources)
        self._states = [SourceState() for _ in sources]
        self._assignment = ChunkAssignment(len(wanted), self._states)
        hedge_slow = self.transfer_class != TransferClass.IDLE
        self._policy = SourcePolicy(self._states, self._assignment, max(options.num_striped, 1), hedge_slow)
        self._streams: dict[int, SourceStream] = {}  # the open ones
        self._threads: list[threading.Thread] = []
        self._accepted: deque[int] = deque()
        self._failures: list[tuple[str, Exception]] = []
        self._error: Exception | None = None
        self._review_at = -math.inf
        self._num_repairs_reported = 0
        self._is_waiting = False  # the iterating thread has no source and waits for other threads
        self._changed = threading.Condition(threading.Lock())  # guards all of the above

    def run(self) -> Generator[int, None, None]:
        """Yields each chunk once accepted, until all are or the stop event is set. Raises ``SourcesExhausted``."""
        own: SourceStream | None = None
        try:
            while True:
                # Read before the accepted chunks are drained; chunks accepted later are yielded in the next round.
                is_over = self._assignment.num_left == 0 or self._stop.is_set()
                while self._accepted:
                    yield self._accepted.popleft()
                if self._error is not None:
                    raise self._error
                if is_over:
                    return
                if own is None:
                    own = self._open_next()
                elif not self._step(own):
                    own = None
        finally:
            self._stop.set()
            self._abort_all()
            for thread in self._threads:
                thread.join()
            if own is not None:
                self._close(own)

    def _open_next(self) -> SourceStream | None:
        """The next source to open, for the iterating thread when it has none; without one, waits up to ``TICK_S``."""
        with self._changed:
            joined = self._review(time.monotonic())
            if not joined:
                if self._policy.exhausted:
                    raise self._exhausted()
                self._is_waiting = True
                self._changed.wait(TICK_S)
                self._is_waiting = False
                return None
        self._start_threads(joined[1:])
        return self._stream(joined[0])

    def _start_threads(self, numbers: Sequence[int]) -> None:
        """Opens these sources, each in its own thread."""
        for number in numbers:
            stream = self._stream(number)
            thread = threading.Thread(target=self._run_stream, args=(stream,), name="follow", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system is out of threads
                self._source_failed(stream, OSError(str(error)))
            else:
                self._threads.append(thread)

    def _stream(self, number: int) -> SourceStream:
        return SourceStream(self, self._sink, number, self._sources[number])

    def _run_stream(self, stream: SourceStream) -> None:
        while self._step(stream):
            pass
        if not self._stop.is_set():
            self._send_requests(time.monotonic())

    def _step(self, stream: SourceStream) -> bool:
        """Receives a frame of the source. False: the stream has ended."""
        try:
            stream.step()
            return True
        except StopRequested:
            self._close(stream)
        except _SOURCE_FAILURES as error:
            self._close(stream)
            self._source_failed(stream, error)
        except Exception as error:  # from the sink, or a bug: the iterating thread raises it
            self._close(stream)
            with self._changed:
                self._error = self._error or (error.cause if isinstance(error, SinkFailed) else error)
                self._changed.notify_all()
            self._abort_all()
        return False

    def _close(self, stream: SourceStream) -> None:
        with self._changed:
            if self._streams.pop(stream.number, None) is not None:
                stream.count(self._stats, followed=False)
        stream.close()

    def _source_failed(self, stream: SourceStream, error: Exception) -> None:
        if self._stop.is_set() or self._assignment.num_left == 0:
            return
        holder_id = stream.source.holder_id
        log.warning("source_failed", buffer_id=self._buffer_id, holder_id=holder_id, reason=str(error))
        # A refusal is final; after a broken connection or a damaged chunk the source is tried once more.
        final = isinstance(error, PermissionDenied | NotFound | BufferLost)
        self._stats.failed(holder_id, str(error))
        if isinstance(error, ChunkDamaged):
            self._stats.damaged()
        with self._changed:
            self._failures.append((holder_id, error))
            self._policy.failed(stream.number, final=final)
            self._review_at = -math.inf
            self._changed.notify_all()

    def _abort_all(self) -> None:
        with self._changed:
            streams = list(self._streams.values())
        for stream in streams:
            stream.abort()

    def _exhausted(self) -> SourcesExhausted:
        causes = "; ".join(f"{holder_id}: {error}" for holder_id, error in self._failures) or "no source was given"
        return SourcesExhausted(
            f"no source delivered the last {self._assignment.num_left} chunks of {self._buffer_id} ({causes})",
            failures=tuple(self._failures),
        )

    # -- StreamOwner: called by each stream from its own thread

    @property
    def transfer_class(self) -> TransferClass:
        return self._options.transfer_class

    def connect(self, source: SourceAddress, watch: Callable[[int], None]) -> Upstream:
        timeout_s = CONNECT_TIMEOUT_S if self._policy.has_alternatives else math.inf
        return Upstream.open(source, self._receiver, self._options, self._stop, timeout_s, watch)

    def opened(self, stream: SourceStream) -> None:
        with self._changed:
            self._streams[stream.number] = stream
            self._policy.opened(stream.number, time.monotonic())
        if self._stop.is_set():
            raise StopRequested

    def reopening(self, stream: SourceStream) -> None:
        with self._changed:
            self._streams.pop(stream.number, None)
            stream.count(self._stats, followed=False)
            self._policy.reopening(stream.number, time.monotonic())

    def gained(self, stream: SourceStream, indices: Sequence[int]) -> None:
        now = time.monotonic()
        with self._changed:
            positions = [self._position[index] for index in indices if index in self._position]
            self._policy.gained(stream.number, positions, now)
        self._send_requests(now)

    def frame_received(self, stream: SourceStream) -> None:
        now = time.monotonic()
        with self._changed:
            self._policy.frame_received(stream.number, now)
        self.progress(stream, 0, now)

    def begin(self, stream: SourceStream, index: int) -> bool:
        with self._changed:
            return self._assignment.begin(stream.number, self._position[index], time.monotonic())

    def progress(self, stream: SourceStream, num_bytes: int, now: float) -> None:
        overdue, revoked = "", False
        with self._changed:
            if stream.number in self._streams:
                self._assignment.record(self._states[stream.number], num_bytes, now)
        self._send_requests(now, stream)
        with self._changed:
            if stream.number in self._streams:
                overdue = self._policy.overdue(stream.number, self._options.stall_s, self._options.starve_s, now)
                revoked = self._assignment.release_revoked(stream.number, now)
        if overdue:
            raise SourceStalled(overdue)
        if revoked:
            raise ChunkRevoked

    def accepted(self, stream: SourceStream, index: int, num_bytes: int, num_unreported_bytes: int) -> None:
        now = time.monotonic()
        self._stats.received(stream.source.holder_id, num_bytes)
        with self._changed:
            self._assignment.record(self._states[stream.number], num_unreported_bytes, now)
            self._assignment.accepted(stream.number, self._position[index], num_bytes, now)
            self._accepted.append(index)
            if self._is_waiting:
                self._changed.notify_all()
            is_over = self._assignment.num_left == 0
        if not is_over:
            self._send_requests(now, stream)
            return
        self._stop.set()  # the iterating thread may be waiting for another source, open or not
        if len(self._streams) > 1:
            self._abort_all()

    # -- acting on the decisions

    def _send_requests(self, now: float, stream: SourceStream | None = None) -> None:
        """Sends the requests of this stream, or after a change those of all streams; opens joining sources."""
        joined: list[int] = []
        with self._changed:
            if now >= self._review_at:
                joined, stream = self._review(now), None
            if stream is None or self._assignment.has_changes:
                self._assignment.has_changes = False
                streams = list(self._streams.values())
            else:
                streams = [stream] if stream.number in self._streams else []
            for receiving in streams:
                self._queue_requests(receiving, now)
        for receiving in streams:
            receiving.send_requests()
        self._start_threads(joined)

    def _queue_requests(self, stream: SourceStream, now: float) -> None:
        requests = self._assignment.requests(stream.number)
        self._assignment.ask(stream.number, requests.wanted, now)
        if requests.wanted or requests.cancelled:
            wanted = [self._wanted[position] for position in requests.wanted]
            stream.ask(ChunkRequests(wanted, [self._wanted[position] for position in requests.cancelled]))

    def _review(self, now: float) -> list[int]:
        """Applies updates and has the policy review the sources; returns the sources to open."""
        for source in reversed(self._updates.take()):  # the source added first joins first
            self._add_source(source)
        self._policy.num_striped = max(self._policy.num_striped, self._updates.num_striped)
        if (asked := self._updates.transfer_class) is not None and asked != self.transfer_class:
            self._options = replace(self._options, transfer_class=asked)
            self._policy.hedge_slow = asked != TransferClass.IDLE
        joined = self._policy.review(now)
        self._review_at = now + REVIEW_INTERVAL_S
        for number in joined:
            log.info("source_joined", buffer_id=self._buffer_id, holder_id=self._sources[number].holder_id)
        self._stats.repaired(self._policy.num_repairs - self._num_repairs_reported)
        self._num_repairs_reported = self._policy.num_repairs
        for number, stream in self._streams.items():
            stream.count(self._stats, followed=not self._states[number].standby)
        return joined

    def _add_source(self, source: SourceAddress) -> None:
        """Adds an alternate; a known source gets its new address and ticket for its next connection."""
        holders = [known.holder_id for known in self._sources]
        number = holders.index(source.holder_id) if source.holder_id in holders else len(holders)
        self._sources[number : number + 1] = [source]
        self._policy.add_source(number)
