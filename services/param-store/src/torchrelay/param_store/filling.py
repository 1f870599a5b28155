"""The filling of one pack of the arena: one thread that walks the given sources until every chunk is verified.

opening (manifest, range) -> filling -> complete
            |                    `----> failed (or dropped): what is missing will not come, until a later Relay
            `-> refused: nothing was reserved
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby

from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.common.telemetry import get_logger, record_span
from torchrelay.param_store.remote import RemoteStore
from torchrelay.param_store.remote_fill import fill_from_remote
from torchrelay.param_store.versions import manifest_key, pack_key
from torchrelay.transfer.arena import Arena
from torchrelay.transfer.follow import Receiver, SourceAddress, fetch_head, follow
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.slabs import Slab

log = get_logger(__name__)
REMOTE = "remote"
STARVE_S = 10.0  # a peer that is alive but brings no chunk for so long is left for the next source
OWNER = "filling"  # pins the slab while its chunks arrive


@dataclass(slots=True)
class CopyRecord:
    """What is told of one pack's copy beside what its slab says. Times are unix microseconds, 0: not yet."""

    pack_id: str
    pack_bytes: int = 0
    num_chunks: int = 0
    source: str = ""
    error: str = ""
    begin_unix_us: int = 0
    first_unix_us: int = 0
    end_unix_us: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a pack comes from. None among the sources stands for the remote store."""

    pack_id: str
    sources: tuple[SourceAddress | None, ...]
    receiver: Receiver
    num_remote_readers: int
    relay_id: str = ""

    def groups(self) -> Iterator[tuple[SourceAddress, ...]]:
        """Neighbouring peers, to be followed with one another as alternates; empty: the remote store."""
        for remote, group in groupby(self.sources, key=lambda source: source is None):
            yield () if remote else tuple(source for source in group if source is not None)


@dataclass(slots=True)
class Filling:
    """Runs ``run`` on a thread of its own; ``reserved`` tells when the range is there: True if the pack was whole."""

    plan: Plan
    arena: Arena
    remote: RemoteStore
    record: CopyRecord
    on_bytes: Callable[[int], None]
    on_change: Callable[[], None]
    stop: threading.Event = field(default_factory=threading.Event)
    reserved: Future[bool] = field(default_factory=Future)

    def run(self) -> None:
        """Never raises: what goes wrong is told by ``reserved``, the record and the slab."""
        self.record.begin_unix_us = _now_us()
        slab: Slab | None = None
        try:
            slab = self._reserve()
            self.reserved.set_result(slab.complete)
            self._fill(slab)
        except Exception as error:
            self._failed(error, slab)
        else:
            self.record.end_unix_us = _now_us()
            self._trace(complete=True)
        finally:
            if slab is not None:
                self.arena.unpin(self.plan.pack_id, OWNER)
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
        self._trace(complete=False)

    def _trace(self, *, complete: bool) -> None:
        record = self.record
        begin, end = record.begin_unix_us * 1000, _now_us() * 1000
        about = {"pack_id": record.pack_id, "relay_id": self.plan.relay_id, "source": record.source}
        record_span("relay", "", begin, end, **about, complete=complete)

    def _reserve(self) -> Slab:
        """The slab of an earlier, interrupted filling, or a new one by the manifest of the first source that has it."""
        slab = self.arena.get(self.plan.pack_id)
        slab = self.arena.reserve(self._head() if slab is None else slab.head, OWNER)
        self.record.pack_bytes, self.record.num_chunks = slab.num_bytes, slab.num_chunks
        self.on_change()
        return slab

    def _head(self) -> bytes:
        failures = []
        for source in self.plan.sources:
            try:
                head = self._head_from(source)
            except (TorchrelayError, OSError) as error:
                failures.append(f"{_name(source)}: {error}")
                continue
            if pack_id_of(head) == self.plan.pack_id:
                return head
            failures.append(f"{_name(source)}: its manifest is damaged")
        raise Unavailable(f"no source gave the manifest of pack {self.plan.pack_id}: {'; '.join(failures)}")

    def _head_from(self, source: SourceAddress | None) -> bytes:
        if source is None:
            return self.remote.get_bytes(manifest_key(self.plan.pack_id))
        return fetch_head(source, self.plan.receiver, self.stop)

    def _fill(self, slab: Slab) -> None:
        failures = []
        for peers in self.plan.groups():
            missing = slab.missing()
            if not missing or self.stop.is_set():
                break
            self.record.source = peers[0].holder_id if peers else REMOTE
            try:
                self._fill_from(peers, slab, missing)
            except (TorchrelayError, OSError) as error:
                failures.append(f"{self.record.source}: {error}")
                log.warning("source_failed", pack_id=slab.pack_id, source=self.record.source, error=str(error))
        if slab.complete:  # even when it was stopped at that very moment
            return
        if self.stop.is_set():
            raise Unavailable("the filling was stopped")
        raise Unavailable(f"no source has the missing chunks: {'; '.join(failures)}")

    def _fill_from(self, peers: Sequence[SourceAddress], slab: Slab, missing: Sequence[int]) -> None:
        def on_chunk(index: int) -> None:
            if not self.record.first_unix_us:
                self.record.first_unix_us = _now_us()
            self.on_bytes(len(slab.chunk(index)))
            self.on_change()

        if peers:
            for index in follow(slab.pack_id, missing, peers, slab, self.plan.receiver, self.stop, starve_s=STARVE_S):
                on_chunk(index)
            return
        manifest = slab.manifest
        with closing(self.remote.open_range(pack_key(slab.pack_id))) as reader:
            fill_from_remote(
                slab.pack_id,
                reader,
                manifest.chunk_bytes,
                slab,
                missing,
                self.stop,
                on_chunk,
                self.plan.num_remote_readers,
            )


def _name(source: SourceAddress | None) -> str:
    return REMOTE if source is None else source.holder_id


def _now_us() -> int:
    return time.time_ns() // 1000
