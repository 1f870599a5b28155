"""The download of a pack into the arena: one thread tries the sources in turn until every chunk is verified.

reserving (manifest, range) -> downloading -> complete
            |                       `-------> failed (or dropped): incomplete until a later relay
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
from torchrelay.param_store.copies.copy_record import CopyRecord
from torchrelay.param_store.copies.remote_download import download_from_remote
from torchrelay.param_store.copies.transfer_counts import DISK, PEER, REMOTE, TransferCounts
from torchrelay.param_store.remote.keys import manifest_key, pack_key
from torchrelay.param_store.remote.remote_store import RangeReader, RemoteStore
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
STARVATION_TIMEOUT_S = 10.0  # a live peer is dropped after this time without a chunk from any source
SILENCE_TIMEOUT_S = 2.0  # a silent peer is dropped after this time if another source remains
DOWNLOAD_PIN = "download"  # pins the slab while its chunks arrive


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """The sources of a pack. None among them stands for the remote store.

    ``num_striped`` of the first peers are followed at once; the other sources are alternates.
    """

    pack_id: str
    sources: tuple[SourceAddress | None, ...]
    relay_id: str = ""
    keep_retained: bool = False  # fail rather than evict retained packs
    num_striped: int = 1
    transfer_class: TransferClass = TransferClass.URGENT

    def groups(self) -> Iterator[tuple[SourceAddress, ...]]:
        """Groups of consecutive peers, which are alternates of each other; an empty group is the remote store."""
        for is_remote, group in groupby(self.sources, key=lambda source: source is None):
            yield () if is_remote else tuple(source for source in group if source is not None)


@dataclass(frozen=True, slots=True)
class DownloadContext:
    """The parts of the store that its downloads use."""

    arena: Arena
    remote: RemoteStore
    receiver: Receiver
    on_change: Callable[[], None]
    transport: Transport = field(default_factory=TcpTransport)  # to peers
    num_remote_readers: int = 4
    counts: TransferCounts = field(default_factory=TransferCounts)


@dataclass(slots=True)
class PackDownload:
    """Call ``run`` in a thread. ``reserved`` ends once the range is reserved; True: the pack was already complete."""

    context: DownloadContext
    plan: DownloadPlan
    record: CopyRecord
    stop: threading.Event = field(default_factory=threading.Event)
    reserved: Future[bool] = field(default_factory=Future)
    updates: SourceUpdates = field(default_factory=SourceUpdates)  # peers added since the download began

    @property
    def is_ending(self) -> bool:
        """Whether it has failed or is being stopped."""
        return self.stop.is_set() or bool(self.record.error)

    def run(self) -> None:
        """Downloads the pack. Never raises: ``reserved``, the record and the slab carry the error."""
        self.record.begin_unix_us = now_unix_us()
        slab: Slab | None = None
        try:
            slab = self._reserve()
            self.reserved.set_result(slab.complete)
            self._download(slab)
        except Exception as error:
            self._fail(error, slab)
        else:
            self.record.end_unix_us = now_unix_us()
            self.trace(complete=True)
        finally:
            self.context.counts.count_damaged(PEER, self.record.stats.num_damaged_chunks)
            if slab is not None:
                self.context.arena.unpin(self.plan.pack_id, DOWNLOAD_PIN)
            self.context.on_change()

    def _fail(self, error: Exception, slab: Slab | None) -> None:
        is_expected = isinstance(error, TorchrelayError | OSError)
        message = str(error) if is_expected else f"internal error: {error!r}"
        (log.warning if is_expected else log.exception)("relay_failed", pack_id=self.plan.pack_id, error=message)
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
        """The slab of an interrupted download, or a new slab with the manifest from the first source that has it."""
        arena = self.context.arena
        slab = arena.get(self.plan.pack_id)
        head = self._head() if slab is None else slab.head
        slab = arena.reserve(head, DOWNLOAD_PIN, self.plan.keep_retained)
        self.record.pack_bytes, self.record.num_chunks = slab.num_bytes, slab.num_chunks
        self.context.on_change()
        return slab

    def _head(self) -> bytes:
        failures, is_unpublished = [], False
        for source in self.plan.sources:
            name = REMOTE if source is None else source.holder_id
            try:
                head = self._head_from(source)
            except (TorchrelayError, OSError) as error:
                failures.append(f"{name}: {error}")
                is_unpublished |= source is None and isinstance(error, NotFound)
                continue
            if pack_id_of(head) == self.plan.pack_id:
                return head
            failures.append(f"{name}: its manifest is damaged")
        # A pack missing from the remote store is not published: asking other stores is pointless.
        kind = NotFound if is_unpublished else Unavailable
        raise kind(f"no source has the manifest of pack {self.plan.pack_id}: {'; '.join(failures)}")

    def _head_from(self, source: SourceAddress | None) -> bytes:
        context = self.context
        if source is None:
            return context.remote.get_bytes(manifest_key(self.plan.pack_id))
        return fetch_head(source, context.receiver, FollowOptions(context.transport), self.stop)

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
                    groups.insert(1, ())  # then the remote store again, for the chunks that they lack
        if slab.complete:  # even if it was stopped at that moment
            return
        if self.stop.is_set():
            raise Unavailable("the download was stopped")
        raise Unavailable(f"no source has the missing chunks: {'; '.join(failures)}")

    def _download_from_peers(
        self, peers: Sequence[SourceAddress], slab: Slab, missing: Sequence[int], stall_s: float
    ) -> None:
        context, plan = self.context, self.plan
        options = FollowOptions(context.transport, stall_s, STARVATION_TIMEOUT_S, plan.num_striped, plan.transfer_class)
        control = TransferControl(self.stop, self.updates, self.record.stats)
        sink = _NotifyingSink(slab, lambda index: self._count_chunk(PEER, slab, index))
        for _ in follow(slab.pack_id, missing, peers, sink, context.receiver, options, control):
            pass  # the sink announces each chunk on the thread that receives it

    def _download_from_remote(self, slab: Slab, missing: Sequence[int]) -> None:
        """Downloads the missing chunks until the pack is complete or peers are added."""
        stats = self.record.stats

        def source_of(reader: RangeReader) -> str:
            return DISK if reader.is_cached else REMOTE

        def on_chunk(index: int) -> None:
            stats.received(REMOTE, len(slab.chunk(index)))
            self._count_chunk(source_of(reader), slab, index)

        stats.joined(REMOTE)
        try:
            with closing(self.context.remote.open_range(pack_key(slab.pack_id))) as reader:
                download_from_remote(
                    slab.pack_id,
                    reader,
                    slab.manifest.chunk_bytes,
                    slab,
                    takewhile(lambda _: not self.updates.any_waiting, missing),
                    self.stop,
                    on_chunk,
                    lambda: self.context.counts.count_damaged(source_of(reader)),
                    self.context.num_remote_readers,
                )
        except (TorchrelayError, OSError) as error:
            stats.failed(REMOTE, str(error))
            raise
        finally:
            stats.left(REMOTE)

    def _count_chunk(self, source: str, slab: Slab, index: int) -> None:
        if not self.record.first_unix_us:
            self.record.first_unix_us = now_unix_us()
        self.context.counts.count_received(source, len(slab.chunk(index)))
        self.context.on_change()


@dataclass(frozen=True, slots=True)
class _NotifyingSink:
    """The slab as a ``Sink`` that announces each chunk at once, even while ``follow`` waits for a silent source."""

    slab: Slab
    notify: Callable[[int], None]

    def chunk(self, index: int) -> memoryview:
        return self.slab.chunk(index)

    def digest(self, index: int) -> bytes:
        return self.slab.digest(index)

    def accept(self, index: int) -> None:
        self.slab.accept(index)
        self.notify(index)
