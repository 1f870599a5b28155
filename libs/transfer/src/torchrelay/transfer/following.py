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
from torchrelay.common.telemetry import get_logger
from torchrelay.transfer.buffers import Sink
from torchrelay.transfer.chunks import Orders
from torchrelay.transfer.errors import BufferLost, SourcesExhausted, SourceStalled
from torchrelay.transfer.frames import LetGo, Stopped
from torchrelay.transfer.sources import SourceAddress
from torchrelay.transfer.stream import SinkFailed, Stream
from torchrelay.transfer.swarm import Swarm
from torchrelay.transfer.terms import Ending, Terms
from torchrelay.transfer.transport import TICK_S, TransferClass

REVIEW_S = 0.02
CONNECT_S = 0.5  # when there is another to turn to
_SOURCE_FAILURES = (TorchrelayError, OSError)
log = get_logger(__name__)


class Following:
    """Iterate over ``run``; everything else is for its ``Stream``s."""

    def __init__(
        self,
        terms: Terms,
        wanted: Sequence[int],
        sources: Sequence[SourceAddress],
        sink: Sink,
        stop: threading.Event | None,
    ) -> None:
        self.terms, self.sink = terms, sink
        self.ending = Ending(stop)
        self.transfer_class = terms.transfer_class
        self._wanted = wanted
        self._place = {index: place for place, index in enumerate(wanted)}
        self._swarm = Swarm(len(wanted), len(sources), terms.rules)
        self._sources = list(sources)
        self._streams: dict[int, Stream] = {}  # the open ones
        self._threads: list[threading.Thread] = []
        self._accepted: deque[int] = deque()
        self._failures: list[tuple[str, Exception]] = []
        self._error: Exception | None = None
        self._review_at = -math.inf
        self._num_repairs_told = 0
        self._waits = False  # the iterating thread has no source of its own, and waits for the others
        self._changed = threading.Condition(threading.Lock())  # guards all of the above

    def run(self) -> Generator[int, None, None]:
        """Yields each chunk once accepted, until all are or ``stop`` is set. Raises ``SourcesExhausted``."""
        mine: Stream | None = None
        try:
            while True:
                over = self._swarm.num_left == 0 or self.ending.is_set()  # before the last look at what was accepted
                while self._accepted:
                    yield self._accepted.popleft()
                if self._error is not None:
                    raise self._error
                if over:
                    return
                if mine is None:
                    mine = self._take_one()
                elif not self._step(mine):
                    mine = None
        finally:
            self.ending.set()
            self._abort_all()
            for thread in self._threads:
                thread.join()
            if mine is not None:
                self._close(mine)

    def _take_one(self) -> Stream | None:
        """For the iterating thread when it has no source: the next to be opened, if any; else it waits a little."""
        with self._changed:
            joined = self._review(time.monotonic())
            if not joined:
                if self._swarm.exhausted:
                    raise self._exhausted()
                self._waits = True
                self._changed.wait(TICK_S)
                self._waits = False
                return None
        self._begin(joined[1:])
        return Stream(self, joined[0], self._sources[joined[0]])

    def _begin(self, numbers: Sequence[int]) -> None:
        """Opens these sources, each in a thread of its own."""
        for number in numbers:
            stream = Stream(self, number, self._sources[number])
            thread = threading.Thread(target=self._drive, args=(stream,), name="follow", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no thread more
                self._lost(stream, OSError(str(error)))
            else:
                self._threads.append(thread)

    def _drive(self, stream: Stream) -> None:
        while self._step(stream):
            pass
        if not self.ending.is_set():
            self._look(time.monotonic())

    def _step(self, stream: Stream) -> bool:
        """One frame of one source; False: it is over with it."""
        try:
            stream.step()
            return True
        except Stopped:
            self._close(stream)
        except _SOURCE_FAILURES as error:
            self._close(stream)
            self._lost(stream, error)
        except Exception as error:  # the sink's, or ours: the iterating thread raises it
            self._close(stream)
            with self._changed:
                self._error = self._error or (error.cause if isinstance(error, SinkFailed) else error)
                self._changed.notify_all()
            self._abort_all()
        return False

    def _close(self, stream: Stream) -> None:
        with self._changed:
            if self._streams.pop(stream.number, None) is not None:
                stream.count(self.terms.tally, followed=False)
        stream.close()

    def _lost(self, stream: Stream, error: Exception) -> None:
        if self.ending.is_set() or self._swarm.num_left == 0:
            return
        holder_id = stream.source.holder_id
        log.warning("source_failed", buffer_id=self.terms.buffer_id, holder_id=holder_id, reason=str(error))
        # A refusal stays a refusal; a broken connection or a damaged chunk deserves one more try.
        final = isinstance(error, PermissionDenied | NotFound | BufferLost)
        self.terms.tally.failed(holder_id, str(error))
        with self._changed:
            self._failures.append((holder_id, error))
            self._swarm.failed(stream.number, final=final)
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
            f"{self._swarm.num_left} chunks of {self.terms.buffer_id} came from no source ({causes})",
            failures=tuple(self._failures),
        )

    # -- what the streams say, each from its own thread

    def connect_s(self) -> float:
        """How long to try to connect."""
        return CONNECT_S if self._swarm.has_alternatives else math.inf

    def opened(self, stream: Stream) -> None:
        with self._changed:
            self._streams[stream.number] = stream
            self._swarm.opened(stream.number, time.monotonic())
        if self.ending.is_set():
            raise Stopped

    def reopening(self, stream: Stream) -> None:
        """It gives its connection up for a new one."""
        with self._changed:
            self._streams.pop(stream.number, None)
            stream.count(self.terms.tally, followed=False)
            self._swarm.reopening(stream.number, time.monotonic())

    def gained(self, stream: Stream, indices: Sequence[int]) -> None:
        """The source has these chunks."""
        now = time.monotonic()
        with self._changed:
            places = [self._place[index] for index in indices if index in self._place]
            self._swarm.gained(stream.number, places, now)
        self._look(now)

    def heard(self, stream: Stream) -> None:
        """It lives."""
        now = time.monotonic()
        with self._changed:
            self._swarm.heard(stream.number, now)
        self.progress(stream, 0, now)

    def begin(self, stream: Stream, index: int) -> bool:
        """A chunk begins to come; False: it is to be passed over."""
        with self._changed:
            return self._swarm.begin(stream.number, self._place[index], time.monotonic())

    def progress(self, stream: Stream, num_bytes: int, now: float) -> None:
        """Some bytes have come, or a tick has passed. Raises ``SourceStalled`` and ``LetGo``."""
        overdue, revoked = "", False
        with self._changed:
            if stream.number in self._streams:
                self._swarm.progress(stream.number, num_bytes, now)
        self._look(now, stream)
        with self._changed:
            if stream.number in self._streams:
                overdue = self._swarm.overdue(stream.number, self.terms.stall_s, self.terms.starve_s, now)
                revoked = self._swarm.release_revoked(stream.number, now)
        if overdue:
            raise SourceStalled(overdue)
        if revoked:
            raise LetGo

    def accepted(self, stream: Stream, index: int, num_bytes: int, num_unnoted_bytes: int) -> None:
        """A chunk is verified and in the sink; of its bytes, so many were not counted as progress yet."""
        now = time.monotonic()
        self.terms.tally.brought(stream.source.holder_id, num_bytes)
        with self._changed:
            self._swarm.progress(stream.number, num_unnoted_bytes, now)
            self._swarm.accepted(stream.number, self._place[index], num_bytes, now)
            self._accepted.append(index)
            if self._waits:
                self._changed.notify_all()
            over = self._swarm.num_left == 0
        if not over:
            self._look(now, stream)
            return
        self.ending.set()  # the iterating thread may wait for another source, open or not
        if len(self._streams) > 1:
            self._abort_all()

    # -- and what comes of it

    def _look(self, now: float, stream: Stream | None = None) -> None:
        """Sends this stream's orders, or everyone's when something of common concern has happened; opens sources."""
        joined: list[int] = []
        with self._changed:
            if now >= self._review_at:
                joined, stream = self._review(now), None
            if stream is None or self._swarm.stirred:
                self._swarm.stirred = False
                streams = list(self._streams.values())
            else:
                streams = [stream] if stream.number in self._streams else []
            for each in streams:
                self._order(each, now)
        for each in streams:
            each.tell()
        self._begin(joined)

    def _order(self, stream: Stream, now: float) -> None:
        orders = self._swarm.orders(stream.number)
        self._swarm.ask(stream.number, orders.wanted, now)
        if orders.wanted or orders.cancelled:
            wanted, cancelled = (
                [self._wanted[place] for place in places] for places in (orders.wanted, orders.cancelled)
            )
            stream.ask(Orders(wanted, cancelled))

    def _review(self, now: float) -> list[int]:
        """Which sources are to be opened."""
        for source in reversed(self.terms.offers.take()):  # the last to be offered is the next to be joined
            self._offer(source)
        self._swarm.widen(self.terms.offers.num_striped)
        if self.terms.offers.is_urgent and self.transfer_class == TransferClass.IDLE:
            self.transfer_class = TransferClass.URGENT
            self._swarm.hasten()
        joined = self._swarm.review(now)
        self._review_at = now + REVIEW_S
        for number in joined:
            log.info("source_joined", buffer_id=self.terms.buffer_id, holder_id=self._sources[number].holder_id)
        self.terms.tally.repaired(self._swarm.num_repairs - self._num_repairs_told)
        self._num_repairs_told = self._swarm.num_repairs
        for number, stream in self._streams.items():
            stream.count(self.terms.tally, followed=not self._swarm.lanes[number].resting)
        return joined

    def _offer(self, source: SourceAddress) -> None:
        """An alternate more, or a known one that has moved or got a new ticket: it counts when it is opened next."""
        holders = [known.holder_id for known in self._sources]
        number = holders.index(source.holder_id) if source.holder_id in holders else len(holders)
        self._sources[number : number + 1] = [source]
        self._swarm.offer(number)
