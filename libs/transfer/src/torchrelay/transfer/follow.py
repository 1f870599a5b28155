"""follow: the one primitive of the relay. Chunks come in the order asked for, each as soon as the holder has it."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from contextlib import closing

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.telemetry import get_logger
from torchrelay.transfer.buffers import Sink
from torchrelay.transfer.errors import SourceClosed, SourcesExhausted
from torchrelay.transfer.frames import Stopped
from torchrelay.transfer.sources import Receiver, Rota, SourceAddress
from torchrelay.transfer.tcp import TcpTransport
from torchrelay.transfer.transport import Transport
from torchrelay.transfer.upstream import Upstream

__all__ = ["Receiver", "SourceAddress", "SourcesExhausted", "fetch_head", "follow"]

STALL_S = 5.0
_SOURCE_FAILURES = (TorchrelayError, OSError)
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
    starve_s: float = math.inf,
) -> Generator[int, None, None]:
    """Receives the wanted chunks into the sink; yields each index, in the order asked for, once verified and accepted.

    Blocks the thread that iterates. When a source breaks off, damages a chunk or sends nothing for ``stall_s``
    (holders that wait for a chunk say so meanwhile, and may for ``starve_s``: copies that after a repair wait for one
    another in a circle would else wait for ever), the chunks still missing come from the next; what was accepted
    is never asked for again. Ends early, without an error, within about 100 ms of ``stop`` being set. Closing the
    generator closes its connection. Raises ``SourcesExhausted`` when every source has failed, and whatever the sink
    raises.
    """
    try:
        rota = Rota(sources)
        yield from _follow(
            buffer_id, wanted, rota, sink, receiver, stop, stall_s, transport or TcpTransport(), starve_s
        )
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

    Nothing is verified here: compare ``pack_id_of(head)``. Raises the holder's refusal (``TicketRefused``,
    ``UnknownBuffer``, ...), ``SourceStalled``, ``SourceClosed`` (also when stopped) or ``OSError``.
    """
    try:
        with closing(Upstream.open(source, receiver, (), transport or TcpTransport(), stall_s, stop)) as upstream:
            return upstream.head
    except Stopped:
        raise SourceClosed(f"stopped while asking {source.holder_id} for a head") from None


def _follow(
    buffer_id: str,
    wanted: Sequence[int],
    rota: Rota,
    sink: Sink,
    receiver: Receiver,
    stop: threading.Event | None,
    stall_s: float,
    transport: Transport,
    starve_s: float,
) -> Generator[int, None, None]:
    position = 0
    while position < len(wanted):
        source = rota.current()
        if source is None:
            raise _exhausted(buffer_id, len(wanted) - position, rota)
        try:
            upstream = Upstream.open(source, receiver, wanted[position:], transport, stall_s, stop)
        except _SOURCE_FAILURES as error:
            _give_up(buffer_id, rota, error)
            continue
        with closing(upstream):
            while position < len(wanted):
                index = wanted[position]
                view, expected = sink.chunk(index), sink.digest(index)
                try:
                    upstream.receive(index, view, expected, starve_s)
                except _SOURCE_FAILURES as error:
                    _give_up(buffer_id, rota, error)
                    break
                rota.progressed()
                sink.accept(index)
                position += 1
                yield index


def _give_up(buffer_id: str, rota: Rota, error: Exception) -> None:
    source = rota.current()
    log.warning("source_failed", buffer_id=buffer_id, holder_id=source.holder_id if source else "", reason=str(error))
    rota.failed(error)


def _exhausted(buffer_id: str, num_missing: int, rota: Rota) -> SourcesExhausted:
    causes = "; ".join(f"{holder_id}: {error}" for holder_id, error in rota.failures) or "no source was given"
    return SourcesExhausted(
        f"{num_missing} chunks of {buffer_id} came from no source ({causes})", failures=tuple(rota.failures)
    )
