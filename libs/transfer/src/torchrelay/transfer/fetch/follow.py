"""follow: the one primitive of the relay. Chunks come in the order asked for, each as soon as a holder has it."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from contextlib import closing

from torchrelay.transfer.buffers import Sink
from torchrelay.transfer.errors import SourceClosed, SourcesExhausted
from torchrelay.transfer.fetch.multi_source import MultiSourceFetch
from torchrelay.transfer.fetch.options import FollowOptions
from torchrelay.transfer.fetch.source_policy import SourceRules
from torchrelay.transfer.fetch.sources import Receiver, SourceAddress, SourceUpdates
from torchrelay.transfer.fetch.statistics import TransferStats
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.protocol.frame_stream import StopRequested
from torchrelay.transfer.transport.interface import TransferClass, Transport
from torchrelay.transfer.transport.tcp import TcpTransport

__all__ = ["Receiver", "SourceAddress", "SourcesExhausted", "fetch_head", "follow"]

STALL_S = 5.0


def follow(
    buffer_id: str,
    wanted: Sequence[int],
    sources: Sequence[SourceAddress],
    sink: Sink,
    receiver: Receiver,
    stop: threading.Event | None = None,
    stall_s: float = STALL_S,
    transport: Transport | None = None,
    starve_s: float = math.inf,
    num_striped: int = 1,
    transfer_class: TransferClass = TransferClass.KV,
    stats: TransferStats | None = None,
    updates: SourceUpdates | None = None,
) -> Generator[int, None, None]:
    """Receives the wanted chunks, each wanted once, into the sink; yields each index once verified and accepted.

    They are asked for in the order given, and come in that order from one source that has them; from several, nearly.
    The first ``num_striped`` sources are followed from the start, for different chunks; the others are alternates.
    One is joined as soon as a source turns slow or falls silent (within about 0.2 s), at once when one breaks off,
    refuses or damages a chunk, and after half a second in which a source says that it has nothing. See ``swarm``. A
    source is left after ``stall_s`` without a byte while something was due, or ``starve_s`` in which nothing came from
    anywhere and it had nothing to send: copies that after a repair wait for one another in a circle would else wait for
    ever. It is tried once more, and left for good when it fails again before it brings a chunk. What was accepted is
    never asked for again.

    Blocks the thread that iterates. ``tally`` learns what each source brings; what is put into ``offers`` is an
    alternate from then on, before the others. A transfer of class ``IDLE`` joins no source because of another's
    slowness, until ``offers`` calls it urgent: then its streams are opened anew. Ends early, without an error, within
    about 100 ms of ``stop`` being set. Closing the generator closes its connections. Raises ``SourcesExhausted`` when
    every source has failed, and whatever the sink raises.
    """
    rules = SourceRules(max(num_striped, 1), hedge_slow=transfer_class != TransferClass.IDLE)
    options = FollowOptions(
        buffer_id,
        receiver,
        transport or TcpTransport(),
        rules,
        transfer_class,
        stall_s,
        starve_s,
        stats or TransferStats(),
        updates or SourceUpdates(),
    )
    yield from MultiSourceFetch(options, wanted, sources, sink, stop).run()


def fetch_head(
    source: SourceAddress,
    receiver: Receiver,
    stop: threading.Event | None = None,
    stall_s: float = STALL_S,
    transport: Transport | None = None,
) -> bytes:
    """The head of the buffer that the source's ticket names: for a pack, its encoded manifest.

    Nothing is verified here: compare ``pack_id_of(head)``. Raises the holder's refusal (``TicketRefused``,
    ``UnknownBuffer``, ...), ``SourceStalled``, ``SourceClosed`` (also when stopped) or ``OSError``.
    """
    try:
        with closing(Upstream.open(source, receiver, transport or TcpTransport(), stall_s, stop)) as upstream:
            return upstream.head
    except StopRequested:
        raise SourceClosed(f"stopped while asking {source.holder_id} for a head") from None
