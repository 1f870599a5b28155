"""How much a stream of parameters may have on its way, so that it yields to KV: a delay-based window, as pure code.

Whoever shares a link with KV must not stand in its queue. The idea is LEDBAT's (RFC 6817): the round trip, less the
shortest one seen, is time spent in queues; a stream that holds this to a target below a millisecond fills an idle link,
and gives way, within a few round trips, to whoever does not hold back. What is set is a window of bytes under way:
unlike a rate, it yields by itself, between two looks at the clock, since with a longer queue a window takes longer to
pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.transfer.transport.interface import TransferClass

INITIAL_WINDOW_BYTES = 64 << 10
MAX_WINDOW_BYTES = 8 << 20
# Beside a KV stream that keeps a queue of milliseconds this is a few per cent of a link of 400 Mbit/s, and enough to
# see the queue go.
MIN_WINDOW_BYTES = 8 << 10
# The idle yield to the urgent by the same law as both do to KV: they bear a shorter queue. Shorter still, and the
# processor's own delays would look like one.
TARGET_QUEUE_S = {TransferClass.URGENT: 0.001, TransferClass.IDLE: 0.0005}
INCREASE_FACTOR = 0.1  # of the window, at a sample near the target
MIN_DECREASE_FACTOR = 0.25  # the smallest factor of one decrease
BUSY_SHARE = 0.5  # of the time between two samples: a sender that sends for less of it was not held back by its window
_SMOOTHING = 1 / 8  # the weight that the kernel gives a new round trip (RFC 6298)


@dataclass(frozen=True, slots=True)
class ConnectionCounters:
    """What is known of a connection at one time: its round trips, and totals since it began."""

    at_s: float
    rtt_s: float  # smoothed
    min_rtt_s: float
    num_segments_in: int  # while we send, these are acknowledgements
    sending_s: float  # time spent in sending, which blocks while the window is full


class CongestionWindow:
    """The window of one connection; ``observe`` its counters about once a round trip."""

    def __init__(self, transfer_class: TransferClass, counters: ConnectionCounters) -> None:
        """Of any class but ``KV``, which has no pace."""
        self.window_bytes = INITIAL_WINDOW_BYTES
        self._target_s = TARGET_QUEUE_S[transfer_class]
        self._previous = counters

    def observe(self, now: ConnectionCounters) -> int:
        """The new window, in bytes."""
        before, self._previous = self._previous, now
        if now.num_segments_in != before.num_segments_in:
            held_back = now.sending_s - before.sending_s > BUSY_SHARE * (now.at_s - before.at_s)
            window = self._next(recent_rtt_s(before, now), now.min_rtt_s, held_back)
            self.window_bytes = min(max(window, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)
        return self.window_bytes

    def _next(self, rtt_s: float, min_rtt_s: float, held_back: bool) -> int:
        queue_s = rtt_s - min_rtt_s
        if queue_s > self._target_s:
            # When the queue is ours alone, this factor brings it to its target in one step (as FAST TCP does).
            return int(self.window_bytes * max((min_rtt_s + self._target_s) / rtt_s, MIN_DECREASE_FACTOR))
        if not held_back:
            return self.window_bytes  # what a larger one would do is not known
        return int(self.window_bytes * (2 if 2 * queue_s < self._target_s else 1 + INCREASE_FACTOR))


def recent_rtt_s(before: ConnectionCounters, now: ConnectionCounters) -> float:
    """The mean round trip of what was acknowledged between the two, freed of what the smoothing remembers.

    The kernel tells a mean over some eight acknowledgements: too slow to see a queue come, and slower yet to see it go.
    """
    kept = (1 - _SMOOTHING) ** (now.num_segments_in - before.num_segments_in)
    if kept == 1:
        return now.rtt_s
    return max(now.min_rtt_s, (now.rtt_s - kept * before.rtt_s) / (1 - kept))
