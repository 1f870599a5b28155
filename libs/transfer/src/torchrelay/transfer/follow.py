"""follow: the one primitive of the relay. Chunks come in the order asked for, each as soon as the holder has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.telemetry import get_logger
from torchrelay.transfer.buffers import Sink
from torchrelay.transfer.errors import SourcesExhausted
from torchrelay.transfer.sources import Receiver, Rota, SourceAddress
from torchrelay.transfer.tcp import TcpTransport
from torchrelay.transfer.transport import Transport
from torchrelay.transfer.upstream import Upstream
from torchrelay.transfer.wire import Stopped

__all__ = ["Receiver", "SourceAddress", "SourcesExhausted", "fetch_head", "follow"]

STALL_S = 5.0
log = get_logger(__name__)


def follow(
    buffer_id: str,
    wanted: Sequence[int],
    sources: Sequence[SourceAddress],
    sink: Sink,
    receiver: Receiver,
    stop: threading.Event | None = None,
    stall_s: float = STALL_S,
    transport: Transport | None = None,
) -> Iterator[int]:
    """Receives the wanted chunks into the sink; yields each index once it is verified and accepted, in the order asked for.

    Blocks the thread that iterates. When a source breaks off, damages a chunk or sends nothing for ``stall_s`` (holders that
    wait for a chunk say so meanwhile), the chunks still missing come from the next; what was accepted is never asked for
    again. Ends early, without an error, within about 100 ms of ``stop`` being set. Closing the generator closes its
    connection. Raises ``SourcesExhausted`` when every source has failed, and whatever the sink raises.
    """
    try:
        yield from _follow(buffer_id, wanted, sources, sink, receiver, stop, stall_s, transport or TcpTransport())
    except Stopped:
        return


def fetch_head(
    source: SourceAddress,
    receiver: Receiver,
    stop: threading.Event | None = None,
    stall_s: float = STALL_S,
    transport: Transport | None = None,
) -> bytes:
    """The head of the buffer that the source's ticket names: for a pack, its encoded manifest.

    Nothing is verified here: compare ``pack_id_of(head)``. Raises the holder's refusal (``TicketRefused``, ``UnknownBuffer``, ...),
    ``SourceStalled``, ``SourceClosed`` (also when stopped) or ``OSError``.
    """
    raise NotImplementedError


def _follow(
    buffer_id: str,
    wanted: Sequence[int],
    sources: Sequence[SourceAddress],
    sink: Sink,
    receiver: Receiver,
    stop: threading.Event | None,
    stall_s: float,
    transport: Transport,
) -> Iterator[int]:
    raise NotImplementedError
