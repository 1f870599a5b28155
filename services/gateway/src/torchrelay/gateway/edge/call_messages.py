"""The messages that arrive in a call, counted before grpcio receives them. Pure.

grpcio does not tell when a message begins: it only waits for whole ones, and opens the window of a call that waits for
as long a message as the client begins.
"""

from __future__ import annotations

from collections.abc import Callable

_PREFIX_BYTES = 5  # whether it is compressed, and its length


class CallMessages:
    """The messages of a call that have begun to arrive, and those that the call has read."""

    __slots__ = ("_is_ended", "_num_payload_bytes", "_num_unread", "_prefix", "on_begun")

    def __init__(self) -> None:
        self._num_unread = 0
        self._is_ended = False
        self._prefix = b""  # of a message whose length is unknown yet
        self._num_payload_bytes = 0  # of the current message that are still to come
        self.on_begun: Callable[[], None] | None = None  # called when ``has_begun`` is or becomes true

    def receive(self, part: bytes) -> int:
        """Notes bytes of the call. Returns how many messages begin in them."""
        offset, num_begun = 0, 0
        while offset < len(part):
            if self._num_payload_bytes:
                num_bytes = min(self._num_payload_bytes, len(part) - offset)
                self._num_payload_bytes -= num_bytes
            else:
                if not self._prefix:
                    num_begun += 1
                num_bytes = min(_PREFIX_BYTES - len(self._prefix), len(part) - offset)
                self._prefix += part[offset : offset + num_bytes]
                if len(self._prefix) == _PREFIX_BYTES:
                    self._num_payload_bytes, self._prefix = int.from_bytes(self._prefix[1:]), b""
            offset += num_bytes
        self._num_unread += num_begun
        self._tell()
        return num_begun

    def end(self) -> None:
        """Notes that no message follows, or that it is unknown when one begins."""
        self._is_ended = True
        self._tell()

    @property
    def has_begun(self) -> bool:
        """Whether the first byte of the next message has arrived, or the end of the messages."""
        return self._num_unread > 0 or self._is_ended

    @property
    def is_within(self) -> bool:
        """Whether the last message has begun to arrive and is not complete."""
        return bool(self._num_payload_bytes or self._prefix)

    def note_read(self) -> None:
        """Notes that the call has read a message."""
        self._num_unread -= 1

    def _tell(self) -> None:
        if self.has_begun and self.on_begun is not None:
            self.on_begun()
