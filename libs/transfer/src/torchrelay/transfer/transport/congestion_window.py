"""The congestion window of a parameter stream: delay-based, so that it yields to KV. Pure.

A parameter stream that shares a link with KV must not build up a queue there. As in LEDBAT (RFC 6817), the difference
between the round trip and the shortest round trip seen is time spent in queues. A stream that keeps this time below a
target of a millisecond or less fills an idle link, and within a few round trips yields to a stream without such a
target. The control variable is a window of bytes in flight, not a rate: with a longer queue a window takes longer to
drain, so the stream yields even between samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.transfer.transport.transfer_class import TransferClass

INITIAL_WINDOW_BYTES = 64 << 10
MAX_WINDOW_BYTES = 8 << 20
# With a KV stream that keeps a queue of milliseconds, this is a few percent of a 400 Mbit/s link, and enough to notice
# that the queue has drained.
MIN_WINDOW_BYTES = 8 << 10
# Idle transfers yield to urgent ones as both yield to KV: they tolerate a shorter queue. With a still shorter target,
# scheduling delays of the CPU would look like a queue.
TARGET_QUEUE_S = {TransferClass.URGENT: 0.001, TransferClass.IDLE: 0.0005}
INCREASE_FACTOR = 0.1  # of the window, per sample near the target
MIN_DECREASE_FACTOR = 0.25  # the smallest factor of one decrease
BUSY_SHARE = 0.5  # a sender that spent less of the time between two samples sending was not limited by its window
_SMOOTHING = 1 / 8  # the kernel's weight of a new round trip (RFC 6298)


@dataclass(frozen=True, slots=True)
class ConnectionCounters:
    """A sample of a connection: its round trips, and totals since it was opened."""

    at_s: float
    rtt_s: float  # smoothed
    min_rtt_s: float
    num_segments_in: int  # during sends, these are acknowledgements
    sending_s: float  # time spent in send calls, which block while the window is full


class CongestionWindow:
    """The window of one connection; call ``observe`` about once per round trip."""

    def __init__(self, transfer_class: TransferClass, counters: ConnectionCounters) -> None:
        """A window for any class but ``KV``, which is not paced."""
        self.window_bytes = INITIAL_WINDOW_BYTES
        self._target_s = TARGET_QUEUE_S[transfer_class]
        self._previous = counters

    def observe(self, now: ConnectionCounters) -> int:
        """The new window, in bytes."""
        before, self._previous = self._previous, now
        if now.num_segments_in != before.num_segments_in:
            is_limited = now.sending_s - before.sending_s > BUSY_SHARE * (now.at_s - before.at_s)
            window = self._next(recent_rtt_s(before, now), now.min_rtt_s, is_limited)
            self.window_bytes = min(max(window, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)
        return self.window_bytes

    def _next(self, rtt_s: float, min_rtt_s: float, is_limited: bool) -> int:
        queue_s = rtt_s - min_rtt_s
        if queue_s > self._target_s:
            # If the queue is caused by this stream alone, this factor reaches the target in one step, as in FAST TCP.
            return int(self.window_bytes * max((min_rtt_s + self._target_s) / rtt_s, MIN_DECREASE_FACTOR))
        if not is_limited:
            return self.window_bytes  # the effect of a larger window is unknown
        return int(self.window_bytes * (2 if 2 * queue_s < self._target_s else 1 + INCREASE_FACTOR))


def recent_rtt_s(before: ConnectionCounters, now: ConnectionCounters) -> float:
    """The mean round trip of the segments acknowledged between two samples, with the kernel's smoothing undone.

    The kernel reports a mean over about eight acknowledgements, too slow to notice a queue that builds up or drains.
    """
    kept = (1 - _SMOOTHING) ** (now.num_segments_in - before.num_segments_in)
    if kept == 1:
        return now.rtt_s
    return max(now.min_rtt_s, (now.rtt_s - kept * before.rtt_s) / (1 - kept))
