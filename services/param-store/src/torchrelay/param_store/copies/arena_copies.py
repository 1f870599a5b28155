"""The copies of packs in this host's arena: held, downloading, failed."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torchrelay.common.errors import Overloaded
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.quantities import format_count
from torchrelay.param_store.copies.copy_record import CopyRecord
from torchrelay.param_store.copies.pack_download import DownloadContext, DownloadPlan, PackDownload
from torchrelay.transfer.arena.slab import Slab

log = get_logger(__name__)
_MAX_FAILURES_KEPT = 16
_HOLD = "hold:"


@dataclass(frozen=True, slots=True)
class CopyReport:
    """A copy as the store reports it."""

    record: CopyRecord
    num_chunks_verified: int
    num_pins: int


class ArenaCopies:
    """Owns the download threads. Methods may run on any thread."""

    def __init__(self, context: DownloadContext, max_relays: int = 16) -> None:
        self._context = context
        self._arena, self._on_change = context.arena, context.on_change
        self.counts = context.counts
        self._max_relays = max_relays
        self._downloads: dict[str, tuple[PackDownload, threading.Thread]] = {}
        self._records: dict[str, CopyRecord] = {}
        self._num_holds = 0
        self._closed = False
        self._lock = threading.Lock()

    def relay(self, plan: DownloadPlan) -> Future[bool]:
        """Downloads the pack. The future ends once its range is reserved; True: the pack was already complete.

        While a download of the pack runs, the plan's peers become its first alternates, its ``num_striped`` may rise,
        and it takes on the plan's class; after a download that failed or is being stopped, a new one starts. Raises
        ``Overloaded`` when ``max_relays`` run.
        """
        with self._lock:
            running = self._downloads.get(plan.pack_id)
            if running is not None and not running[0].is_ending:
                peers = (source for source in plan.sources if source is not None)
                running[0].updates.add(peers, plan.num_striped, plan.transfer_class)
                return running[0].reserved
            slab = self._arena.get(plan.pack_id)
            if slab is not None and slab.complete:
                complete: Future[bool] = Future()
                complete.set_result(True)
                return complete
            if self._closed or len(self._downloads) >= self._max_relays:
                raise Overloaded(f"this store already downloads {format_count(len(self._downloads), 'pack')}")
            return self._start(plan, None if running is None else running[1])

    def _start(self, plan: DownloadPlan, after: threading.Thread | None) -> Future[bool]:
        record = self._records[plan.pack_id] = CopyRecord(plan.pack_id)
        download = PackDownload(self._context, plan, record)
        thread = threading.Thread(
            target=self._run, args=(download, after), name=f"download-{plan.pack_id[:8]}", daemon=True
        )
        download.reserved.set_running_or_notify_cancel()  # from now on, callers that stop waiting cannot cancel it
        thread.start()  # may fail: registered afterwards
        self._downloads[plan.pack_id] = (download, thread)
        return download.reserved

    def _run(self, download: PackDownload, after: threading.Thread | None) -> None:
        if after is not None:
            after.join()
        download.run()
        pack_id = download.plan.pack_id
        with self._lock:
            if self._downloads[pack_id][0] is download:
                del self._downloads[pack_id]
            slab = self._arena.get(pack_id)
            if slab is not None and not slab.complete and not self._closed:  # a kept arena keeps partial packs
                self._arena.drop(pack_id, when_unpinned=True)  # it may be held or followed
            self._forget_old_failures()
        self._on_change()

    def hold(self, pack_id: str, owner_id: str) -> tuple[Slab, str]:
        """Pins the pack; pass both to ``release``. Raises ``NotFound`` if it is not in the arena."""
        with self._lock:
            self._num_holds += 1
            owner = f"{_HOLD}{owner_id}/{self._num_holds}"  # a restarted worker may briefly hold it twice
            self._arena.pin(pack_id, owner)
            slab = self._arena.get(pack_id)
            assert slab is not None  # it is pinned
        self._on_change()
        return slab, owner

    def release(self, slab: Slab, owner: str) -> None:
        with self._lock:
            self._arena.unpin(slab.pack_id, owner)
            if slab.error and slab.pack_id not in self._downloads and not self._closed:
                self._arena.drop(slab.pack_id)
        self._on_change()

    def drop(self, pack_id: str) -> bool:
        """Ends a running download and frees the range. False: the pack is held, read or absent. Blocks."""
        with self._lock:
            if self._num_pins(pack_id):
                return False
            running = self._downloads.get(pack_id)
        if running is not None:
            download, thread = running
            download.stop.set()
            thread.join()
        with self._lock:
            if pack_id not in self._downloads:
                self._records.pop(pack_id, None)
            dropped = self._arena.drop(pack_id) or (running is not None and self._arena.get(pack_id) is None)
        self._on_change()
        return dropped

    def failed_download(self, pack_id: str) -> CopyRecord | None:
        """The record of the pack's last download, if it failed."""
        with self._lock:
            record = self._records.get(pack_id)
            return record if record is not None and record.error else None

    def is_downloading(self, pack_id: str) -> bool:
        with self._lock:
            return pack_id in self._downloads

    def copies(self) -> list[CopyReport]:
        """The packs in the arena or downloading, and recent failures."""
        with self._lock:
            slabs = {slab.pack_id: slab for slab in self._arena.slabs()}
            for pack_id, record in list(self._records.items()):
                if pack_id not in slabs and pack_id not in self._downloads and not record.error:
                    del self._records[pack_id]  # evicted
            present = [self._copy(slab) for slab in slabs.values()]
            absent = [record for pack_id, record in self._records.items() if pack_id not in slabs]
            return present + [CopyReport(replace(record), 0, 0) for record in absent]

    def _copy(self, slab: Slab) -> CopyReport:
        record = self._records.get(slab.pack_id)
        reported = replace(record) if record else CopyRecord(slab.pack_id, slab.num_bytes, slab.num_chunks)
        reported.error = reported.error or slab.error
        return CopyReport(reported, slab.num_verified, self._num_pins(slab.pack_id))

    def _num_pins(self, pack_id: str) -> int:
        return sum(owner.startswith(_HOLD) for owner in self._arena.owners(pack_id))

    def recheck(self) -> None:
        """Verifies the packs that an earlier process left in the arena and fails incomplete ones. Blocks."""
        for slab in self._arena.slabs():
            slab.recheck()
            with self._lock:
                if not slab.complete and slab.pack_id not in self._downloads:
                    slab.fail("the store restarted during the download")
            self._on_change()
            log.info("slab_rechecked", pack_id=slab.pack_id, num_verified=slab.num_verified, num_chunks=slab.num_chunks)

    def close(self) -> None:
        """Stops all downloads and waits for their threads."""
        with self._lock:
            self._closed = True
            running = list(self._downloads.values())
        for download, _ in running:
            download.stop.set()
        for _, thread in running:
            thread.join()

    def _forget_old_failures(self) -> None:
        failed = [pack_id for pack_id, record in self._records.items() if record.error]
        for pack_id in failed[:-_MAX_FAILURES_KEPT]:
            del self._records[pack_id]
