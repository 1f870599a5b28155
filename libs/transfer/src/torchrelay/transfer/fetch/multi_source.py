"""One transfer under way: the threads that act out what ``swarm`` decides.

The first source is received from in the thread that iterates, so with one source there is no hand-over between
threads; every further one has a thread of its own. All receive straight into the sink. Whoever has received
something, or waited a while, has the swarm look again, opens what is to be opened, and sends what is to be asked, also
to the sources of others.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence

from torchrelay.common.errors import NotFound, PermissionDenied, TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.buffers import Sink
from torchrelay.transfer.errors import BufferLost, SourcesExhausted, SourceStalled
from torchrelay.transfer.fetch.chunk_assignment import ChunkRequests
from torchrelay.transfer.fetch.options import FollowOptions, StopSignal
from torchrelay.transfer.fetch.source_policy import SourcePolicy
from torchrelay.transfer.fetch.source_stream import SinkFailed, SourceStream
from torchrelay.transfer.fetch.sources import SourceAddress
from torchrelay.transfer.protocol.frame_stream import ChunkRevoked, StopRequested
from torchrelay.transfer.transport.interface import TICK_S, TransferClass

REVIEW_INTERVAL_S = 0.02
CONNECT_TIMEOUT_S = 0.5  # when there is another to turn to
_SOURCE_FAILURES = (TorchrelayError, OSError)
log = get_logger(__name__)


class MultiSourceFetch:
    """Iterate over ``run``; everything else is for its ``Stream``s."""

    def __init__(
        self,
        options: FollowOptions,
        wanted: Sequence[int],
        sources: Sequence[SourceAddress],
        sink: Sink,
        stop: threading.Event | None,
    ) -> None:
        self.options, self.sink = options, sink
        self.stop_signal = StopSignal(stop)
        self.transfer_class = options.transfer_class
        self._wanted = wanted
        self._place = {index: place for place, index in enumerate(wanted)}
        self._policy = SourcePolicy(len(wanted), len(sources), options.rules)
        self._sources = list(sources)
        self._streams: dict[int, SourceStream] = {}  # the open ones
        self._threads: list[threading.Thread] = []
        self._accepted: deque[int] = deque()
        self._failures: list[tuple[str, Exception]] = []
        self._error: Exception | None = None
        self._review_at = -math.inf
        self._num_repairs_reported = 0
        self._is_waiting = False  # the iterating thread has no source of its own, and waits for the others
        self._changed = threading.Condition(threading.Lock())  # guards all of the above

    def run(self) -> Generator[int, None, None]:
        """Yields each chunk once accepted, until all are or ``stop`` is set. Raises ``SourcesExhausted``."""
        mine: SourceStream | None = None
        try:
            while True:
                over = (
                    self._policy.num_left == 0 or self.stop_signal.is_set()
                )  # before the last look at what was accepted
                while self._accepted:
                    yield self._accepted.popleft()
                if self._error is not None:
                    raise self._error
                if over:
                    return
                if mine is None:
                    mine = self._open_next()
                elif not self._step(mine):
                    mine = None
        finally:
            self.stop_signal.set()
            self._abort_all()
            for thread in self._threads:
                thread.join()
            if mine is not None:
                self._close(mine)

    def _open_next(self) -> SourceStream | None:
        """For the iterating thread when it has no source: the next to be opened, if any; else it waits a little."""
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
        return SourceStream(self, joined[0], self._sources[joined[0]])

    def _start_threads(self, numbers: Sequence[int]) -> None:
        """Opens these sources, each in a thread of its own."""
        for number in numbers:
            stream = SourceStream(self, number, self._sources[number])
            thread = threading.Thread(target=self._run_stream, args=(stream,), name="follow", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no thread more
                self._source_failed(stream, OSError(str(error)))
            else:
                self._threads.append(thread)

    def _run_stream(self, stream: SourceStream) -> None:
        while self._step(stream):
            pass
        if not self.stop_signal.is_set():
            self._send_requests(time.monotonic())

    def _step(self, stream: SourceStream) -> bool:
        """One frame of one source; False: it is over with it."""
        try:
            stream.step()
            return True
        except StopRequested:
            self._close(stream)
        except _SOURCE_FAILURES as error:
            self._close(stream)
            self._source_failed(stream, error)
        except Exception as error:  # the sink's, or ours: the iterating thread raises it
            self._close(stream)
            with self._changed:
                self._error = self._error or (error.cause if isinstance(error, SinkFailed) else error)
                self._changed.notify_all()
            self._abort_all()
        return False

    def _close(self, stream: SourceStream) -> None:
        with self._changed:
            if self._streams.pop(stream.number, None) is not None:
                stream.count(self.options.stats, followed=False)
        stream.close()

    def _source_failed(self, stream: SourceStream, error: Exception) -> None:
        if self.stop_signal.is_set() or self._policy.num_left == 0:
            return
        holder_id = stream.source.holder_id
        log.warning("source_failed", buffer_id=self.options.buffer_id, holder_id=holder_id, reason=str(error))
        # A refusal stays a refusal; a broken connection or a damaged chunk deserves one more try.
        final = isinstance(error, PermissionDenied | NotFound | BufferLost)
        self.options.stats.failed(holder_id, str(error))
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
            f"{self._policy.num_left} chunks of {self.options.buffer_id} came from no source ({causes})",
            failures=tuple(self._failures),
        )

    # -- what the streams say, each from its own thread

    def connect_s(self) -> float:
        """How long to try to connect."""
        return CONNECT_TIMEOUT_S if self._policy.has_alternatives else math.inf

    def opened(self, stream: SourceStream) -> None:
        with self._changed:
            self._streams[stream.number] = stream
            self._policy.opened(stream.number, time.monotonic())
        if self.stop_signal.is_set():
            raise StopRequested

    def reopening(self, stream: SourceStream) -> None:
        """It gives its connection up for a new one."""
        with self._changed:
            self._streams.pop(stream.number, None)
            stream.count(self.options.stats, followed=False)
            self._policy.reopening(stream.number, time.monotonic())

    def gained(self, stream: SourceStream, indices: Sequence[int]) -> None:
        """The source has these chunks."""
        now = time.monotonic()
        with self._changed:
            places = [self._place[index] for index in indices if index in self._place]
            self._policy.gained(stream.number, places, now)
        self._send_requests(now)

    def frame_received(self, stream: SourceStream) -> None:
        """It lives."""
        now = time.monotonic()
        with self._changed:
            self._policy.frame_received(stream.number, now)
        self.progress(stream, 0, now)

    def begin(self, stream: SourceStream, index: int) -> bool:
        """A chunk begins to come; False: it is to be passed over."""
        with self._changed:
            return self._policy.begin(stream.number, self._place[index], time.monotonic())

    def progress(self, stream: SourceStream, num_bytes: int, now: float) -> None:
        """Some bytes have come, or a tick has passed. Raises ``SourceStalled`` and ``LetGo``."""
        overdue, revoked = "", False
        with self._changed:
            if stream.number in self._streams:
                self._policy.progress(stream.number, num_bytes, now)
        self._send_requests(now, stream)
        with self._changed:
            if stream.number in self._streams:
                overdue = self._policy.overdue(stream.number, self.options.stall_s, self.options.starve_s, now)
                revoked = self._policy.release_revoked(stream.number, now)
        if overdue:
            raise SourceStalled(overdue)
        if revoked:
            raise ChunkRevoked

    def accepted(self, stream: SourceStream, index: int, num_bytes: int, num_unreported_bytes: int) -> None:
        """A chunk is verified and in the sink; of its bytes, so many were not counted as progress yet."""
        now = time.monotonic()
        self.options.stats.received(stream.source.holder_id, num_bytes)
        with self._changed:
            self._policy.progress(stream.number, num_unreported_bytes, now)
            self._policy.accepted(stream.number, self._place[index], num_bytes, now)
            self._accepted.append(index)
            if self._is_waiting:
                self._changed.notify_all()
            over = self._policy.num_left == 0
        if not over:
            self._send_requests(now, stream)
            return
        self.stop_signal.set()  # the iterating thread may wait for another source, open or not
        if len(self._streams) > 1:
            self._abort_all()

    # -- and what comes of it

    def _send_requests(self, now: float, stream: SourceStream | None = None) -> None:
        """Sends this stream's orders, or everyone's when something of common concern has happened; opens sources."""
        joined: list[int] = []
        with self._changed:
            if now >= self._review_at:
                joined, stream = self._review(now), None
            if stream is None or self._policy.has_changes:
                self._policy.has_changes = False
                streams = list(self._streams.values())
            else:
                streams = [stream] if stream.number in self._streams else []
            for each in streams:
                self._queue_requests(each, now)
        for each in streams:
            each.send_requests()
        self._start_threads(joined)

    def _queue_requests(self, stream: SourceStream, now: float) -> None:
        requests = self._policy.requests(stream.number)
        self._policy.ask(stream.number, requests.wanted, now)
        if requests.wanted or requests.cancelled:
            wanted, cancelled = (
                [self._wanted[place] for place in places] for places in (requests.wanted, requests.cancelled)
            )
            stream.ask(ChunkRequests(wanted, cancelled))

    def _review(self, now: float) -> list[int]:
        """Which sources are to be opened."""
        for source in reversed(self.options.updates.take()):  # the last to be offered is the next to be joined
            self._add_source(source)
        self._policy.raise_num_striped(self.options.updates.num_striped)
        if self.options.updates.is_urgent and self.transfer_class == TransferClass.IDLE:
            self.transfer_class = TransferClass.URGENT
            self._policy.enable_hedging()
        joined = self._policy.review(now)
        self._review_at = now + REVIEW_INTERVAL_S
        for number in joined:
            log.info("source_joined", buffer_id=self.options.buffer_id, holder_id=self._sources[number].holder_id)
        self.options.stats.repaired(self._policy.num_repairs - self._num_repairs_reported)
        self._num_repairs_reported = self._policy.num_repairs
        for number, stream in self._streams.items():
            stream.count(self.options.stats, followed=not self._policy.states[number].standby)
        return joined

    def _add_source(self, source: SourceAddress) -> None:
        """An alternate more, or a known one that has moved or got a new ticket: it counts when it is opened next."""
        holders = [known.holder_id for known in self._sources]
        number = holders.index(source.holder_id) if source.holder_id in holders else len(holders)
        self._sources[number : number + 1] = [source]
        self._policy.add_source(number)
