"""The download of one pack into the arena: one thread tries the sources in turn until every chunk is verified.

reserving (manifest, range) -> downloading -> complete
            |                       `-------> failed (or dropped): incomplete until a later Relay
            `-> refused: nothing was reserved
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, takewhile

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import NotFound, TorchrelayError, Unavailable
from torchrelay.common.process.telemetry import get_logger, record_span
from torchrelay.param_store.copies.copy_record import REMOTE, CopyRecord
from torchrelay.param_store.copies.remote_download import download_from_remote
from torchrelay.param_store.remote.keys import manifest_key, pack_key
from torchrelay.param_store.remote.remote_store import RemoteStore
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.fetch.follow import (
    STALL_S,
    FollowOptions,
    Receiver,
    SourceAddress,
    TransferControl,
    fetch_head,
    follow,
)
from torchrelay.transfer.fetch.sources import SourceUpdates
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.transport.interface import TransferClass, Transport
from torchrelay.transfer.transport.tcp import TcpTransport

log = get_logger(__name__)
STARVATION_TIMEOUT_S = 10.0  # without a chunk from anywhere, after which a live peer is left for the next source
SILENCE_TIMEOUT_S = 2.0  # after which a silent peer is left, if another source remains
DOWNLOAD_PIN = "download"  # pins the slab while its chunks arrive


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """Where a pack comes from. None among the sources stands for the remote store.

    ``num_striped`` of the first peers are followed at once; the others and the remote store are for repair.
    """

    pack_id: str
    sources: tuple[SourceAddress | None, ...]
    receiver: Receiver
    num_remote_readers: int
    relay_id: str = ""
    keep_retained: bool = False  # fail rather than evict retained packs
    transport: Transport | None = None  # to peers; None: plain TCP
    num_striped: int = 1
    transfer_class: TransferClass = TransferClass.URGENT

    def groups(self) -> Iterator[tuple[SourceAddress, ...]]:
        """Consecutive peers, which are followed together as alternates; an empty group: the remote store."""
        for is_remote, group in groupby(self.sources, key=lambda source: source is None):
            yield () if is_remote else tuple(source for source in group if source is not None)


@dataclass(slots=True)
class PackDownload:
    """``run`` is for a thread of its own; ``reserved`` ends once the range is there: True if the pack was complete."""

    plan: DownloadPlan
    arena: Arena
    remote: RemoteStore
    record: CopyRecord
    on_bytes: Callable[[int], None]
    on_change: Callable[[], None]
    stop: threading.Event = field(default_factory=threading.Event)
    reserved: Future[bool] = field(default_factory=Future)
    updates: SourceUpdates = field(default_factory=SourceUpdates)  # peers named since it began

    @property
    def is_ending(self) -> bool:
        """Whether it has failed or is being stopped."""
        return self.stop.is_set() or bool(self.record.error)

    def run(self) -> None:
        """Never raises: ``reserved``, the record and the slab carry the error."""
        self.record.begin_unix_us = now_unix_us()
        slab: Slab | None = None
        try:
            slab = self._reserve()
            self.reserved.set_result(slab.complete)
            self._download(slab)
        except Exception as error:
            self._failed(error, slab)
        else:
            self.record.end_unix_us = now_unix_us()
            self.trace(complete=True)
        finally:
            if slab is not None:
                self.arena.unpin(self.plan.pack_id, DOWNLOAD_PIN)
            self.on_change()

    def _failed(self, error: Exception, slab: Slab | None) -> None:
        expected = isinstance(error, TorchrelayError | OSError)
        message = str(error) if expected else f"internal error: {error!r}"
        (log.warning if expected else log.exception)("relay_failed", pack_id=self.plan.pack_id, error=message)
        self.record.error = message
        if slab is None:
            self.reserved.set_exception(error if isinstance(error, TorchrelayError) else Unavailable(message))
        else:
            slab.fail(message)
        self.trace(complete=False)

    def trace(self, *, complete: bool) -> None:
        """Records the span of the whole download."""
        record = self.record
        begin, end = record.begin_unix_us * 1000, now_unix_us() * 1000
        attributes = {"pack_id": record.pack_id, "relay_id": self.plan.relay_id, "source": record.source}
        record_span("param_store.relay", "", begin, end, **attributes, complete=complete)

    def _reserve(self) -> Slab:
        """The slab of an interrupted download, or a new one by the manifest of the first source that has it."""
        slab = self.arena.get(self.plan.pack_id)
        head = self._head() if slab is None else slab.head
        slab = self.arena.reserve(head, DOWNLOAD_PIN, self.plan.keep_retained)
        self.record.pack_bytes, self.record.num_chunks = slab.num_bytes, slab.num_chunks
        self.on_change()
        return slab

    def _head(self) -> bytes:
        failures, is_unpublished = [], False
        for source in self.plan.sources:
            try:
                head = self._head_from(source)
            except (TorchrelayError, OSError) as error:
                failures.append(f"{_source_name(source)}: {error}")
                is_unpublished |= source is None and isinstance(error, NotFound)
                continue
            if pack_id_of(head) == self.plan.pack_id:
                return head
            failures.append(f"{_source_name(source)}: its manifest is damaged")
        # A pack missing from the remote store is not published: asking other stores is pointless.
        kind = NotFound if is_unpublished else Unavailable
        raise kind(f"no source has the manifest of pack {self.plan.pack_id}: {'; '.join(failures)}")

    def _head_from(self, source: SourceAddress | None) -> bytes:
        if source is None:
            return self.remote.get_bytes(manifest_key(self.plan.pack_id))
        return fetch_head(source, self.plan.receiver, FollowOptions(self.plan.transport or TcpTransport()), self.stop)

    def _download(self, slab: Slab) -> None:
        failures = []
        groups = deque(self.plan.groups())
        while groups and not self.stop.is_set() and (missing := slab.missing()):
            peers = groups.popleft()
            name = peers[0].holder_id if peers else REMOTE
            try:
                if peers:
                    self._download_from_peers(peers, slab, missing, SILENCE_TIMEOUT_S if groups else STALL_S)
                else:
                    self._download_from_remote(slab, missing)
            except (TorchrelayError, OSError) as error:
                failures.append(f"{name}: {error}")
                log.warning("source_failed", pack_id=slab.pack_id, source=name, error=str(error))
            if (not peers or not groups) and (late := self.updates.take()):
                groups.appendleft(tuple(late))
                if not peers:
                    groups.insert(1, ())  # back to the remote store for what they lack
        if slab.complete:  # even if it was stopped at that moment
            return
        if self.stop.is_set():
            raise Unavailable("the download was stopped")
        raise Unavailable(f"no source has the missing chunks: {'; '.join(failures)}")

    def _download_from_peers(
        self, peers: Sequence[SourceAddress], slab: Slab, missing: Sequence[int], stall_s: float
    ) -> None:
        plan = self.plan
        options = FollowOptions(
            plan.transport or TcpTransport(), stall_s, STARVATION_TIMEOUT_S, plan.num_striped, plan.transfer_class
        )
        for _ in follow(
            slab.pack_id,
            missing,
            peers,
            _NotifyingSink(slab, self._on_chunk),
            plan.receiver,
            options,
            TransferControl(self.stop, self.updates, self.record.stats),
        ):
            pass  # the sink has announced each chunk, on the thread that received it

    def _download_from_remote(self, slab: Slab, missing: Sequence[int]) -> None:
        """Downloads what is missing until it is complete or peers are named."""
        stats = self.record.stats

        def on_chunk(index: int) -> None:
            stats.received(REMOTE, len(slab.chunk(index)))
            self._on_chunk(slab, index)

        stats.joined(REMOTE)
        try:
            with closing(self.remote.open_range(pack_key(slab.pack_id))) as reader:
                download_from_remote(
                    slab.pack_id,
                    reader,
                    slab.manifest.chunk_bytes,
                    slab,
                    takewhile(lambda _: not self.updates.any_waiting, missing),
                    self.stop,
                    on_chunk,
                    self.plan.num_remote_readers,
                )
        except (TorchrelayError, OSError) as error:
            stats.failed(REMOTE, str(error))
            raise
        finally:
            stats.left(REMOTE)

    def _on_chunk(self, slab: Slab, index: int) -> None:
        if not self.record.first_unix_us:
            self.record.first_unix_us = now_unix_us()
        self.on_bytes(len(slab.chunk(index)))
        self.on_change()


@dataclass(frozen=True, slots=True)
class _NotifyingSink:
    """The slab as a ``Sink`` that announces each chunk at once: the iteration may be waiting for a silent source."""

    slab: Slab
    notify: Callable[[Slab, int], None]

    def chunk(self, index: int) -> memoryview:
        return self.slab.chunk(index)

    def digest(self, index: int) -> bytes:
        return self.slab.digest(index)

    def accept(self, index: int) -> None:
        self.slab.accept(index)
        self.notify(self.slab, index)


def _source_name(source: SourceAddress | None) -> str:
    return REMOTE if source is None else source.holder_id
