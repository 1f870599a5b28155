"""The errors of the data plane, and their place in the platform's error tree.

Unavailable        BufferLost         this holder will never have the bytes
                   SourceStalled      no frame for too long
                   SourceClosed       the connection ended early
                   SourcesExhausted   every source of a transfer failed
DataCorrupted      ChunkDamaged       bytes did not match their digest
                   ArenaCorrupted     the arena's table is inconsistent
                   ProtocolViolation  a peer broke the protocol
PermissionDenied   TicketRefused      wrong MAC, or any of:
                   TicketExpired, WrongHolder, WrongReceiver
NotFound           UnknownBuffer      the holder has no such buffer
Overloaded         ArenaFull          no free space, and no pack that may be evicted
"""

from __future__ import annotations

from torchrelay.common.errors import DataCorrupted, NotFound, Overloaded, PermissionDenied, Unavailable


class BufferLost(Unavailable):
    """The buffer was dropped or has failed: its missing chunks will never be ready."""

    code = "buffer_lost"


class SourceStalled(Unavailable):
    code = "source_stalled"


class SourceClosed(Unavailable):
    code = "source_closed"


class SourcesExhausted(Unavailable):
    """Every source failed. ``failures``: (holder id, cause), in the order of failure."""

    code = "sources_exhausted"

    def __init__(
        self, message: str, *, field: str | None = None, failures: tuple[tuple[str, Exception], ...] = ()
    ) -> None:
        super().__init__(message, field=field)
        self.failures = failures


class ChunkDamaged(DataCorrupted):
    code = "chunk_damaged"


class ArenaCorrupted(DataCorrupted):
    code = "arena_corrupted"


class ProtocolViolation(DataCorrupted):
    code = "protocol_violation"


class TicketRefused(PermissionDenied):
    code = "ticket_refused"


class TicketExpired(TicketRefused):
    code = "ticket_expired"


class WrongHolder(TicketRefused):
    code = "wrong_holder"


class WrongReceiver(TicketRefused):
    code = "wrong_receiver"


class UnknownBuffer(NotFound):
    code = "unknown_buffer"


class ArenaFull(Overloaded):
    code = "arena_full"
