"""``follow`` receives chunks from holders, in the order requested, each as soon as a holder has it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import closing

from torchrelay.transfer.buffers import Sink
from torchrelay.transfer.errors import SourceClosed
from torchrelay.transfer.fetch.multi_source import MultiSourceFetch
from torchrelay.transfer.fetch.options import STALL_S, FollowOptions, TransferControl
from torchrelay.transfer.fetch.sources import Receiver, SourceAddress
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.protocol.frame_stream import StopRequested

__all__ = ["STALL_S", "FollowOptions", "Receiver", "SourceAddress", "TransferControl", "fetch_head", "follow"]


def follow(
    buffer_id: str,
    wanted: Sequence[int],
    sources: Sequence[SourceAddress],
    sink: Sink,
    receiver: Receiver,
    options: FollowOptions | None = None,
    control: TransferControl | None = None,
) -> Generator[int, None, None]:
    """Receives the wanted chunks into the sink; yields each index once its chunk is verified and accepted.

    ``wanted`` names each chunk once. From one source that has them, chunks arrive in that order; from several, nearly.
    The first ``options.num_striped`` sources are followed from the start, for different chunks; the others are
    alternates. An alternate joins when a source turns slow or silent (within about 0.2 s), immediately when a source
    disconnects, refuses or sends a damaged chunk, and after half a second in which a source had nothing to send; see
    ``source_policy``. A failed source is retried once, and given up if it fails again before it delivers a chunk.
    Accepted chunks are never requested again.

    ``control.stats`` counts what each source delivers. Sources added to ``control.updates`` are the next to join. In a
    transfer of class ``IDLE`` no source joins because another is slow, until ``control.updates`` makes the
    transfer urgent: then its streams are reopened.

    Blocks the iterating thread. Ends early, without an error, within about 100 ms of ``control.stop`` being set.
    Closing the generator closes its connections. Raises ``SourcesExhausted`` when every source has failed, and
    whatever the sink raises.
    """
    options, control = options or FollowOptions(), control or TransferControl()
    yield from MultiSourceFetch(buffer_id, wanted, sources, sink, receiver, options, control).run()


def fetch_head(
    source: SourceAddress,
    receiver: Receiver,
    options: FollowOptions | None = None,
    stop: threading.Event | None = None,
) -> bytes:
    """The head of the buffer named by the source's ticket: for a pack, its encoded manifest.

    Not verified here: compare ``pack_id_of(head)``. Raises the holder's refusal (``TicketRefused``,
    ``UnknownBuffer``, ...), ``SourceStalled``, ``SourceClosed`` (also when stopped) or ``OSError``.
    """
    try:
        with closing(Upstream.open(source, receiver, options or FollowOptions(), stop)) as upstream:
            return upstream.head
    except StopRequested:
        raise SourceClosed(f"stopped while asking {source.holder_id} for a head") from None
