"""The RPCs about the copies of packs in this host's arena."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from torchrelay.common.errors import InvalidRequest, Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import reports_pb2
from torchrelay.param_store.copies.pack_download import DownloadPlan
from torchrelay.param_store.grpc.messages import source_address, store_beat, store_report
from torchrelay.param_store.remote.keys import checked_digest
from torchrelay.param_store.store import Store
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.transport.interface import TransferClass

Context = grpc.aio.ServicerContext[Any, Any]
log = get_logger(__name__)
_MAX_LEASE_S = 3600.0
_RELAY_WAIT_S = 1.0  # maximum delay of a relay that is ordered together with a load
_MIN_REPORT_INTERVAL_S = 0.05  # for each watcher


class CopyRpcs:
    """Hold, Relay, Drop, WatchCopies, Retain."""

    store: Store

    async def Hold(self, request: pb.HoldRequest, context: Context) -> AsyncIterator[pb.HoldReply]:
        checked_digest(request.pack_id, "pack_id")
        if request.waits_for_relay:
            await self._until_reserved(request.pack_id)
        slab, owner = self.store.arena_copies.hold(request.pack_id, request.owner_id)
        log.info("pack_held", pack_id=request.pack_id, owner_id=request.owner_id)
        try:
            with self.store.changes.listen() as changed:
                sent = None
                while True:
                    changed.clear()
                    state = (slab.num_segments_ready, slab.error)
                    if sent is None and slab.error:
                        raise Unavailable(slab.error)
                    if state != sent:
                        sent = state
                        yield self._hold_reply(slab, *state)
                    await changed.wait()
        finally:
            self.store.arena_copies.release(slab, owner)
            log.info("pack_released", pack_id=request.pack_id, owner_id=request.owner_id)

    async def _until_reserved(self, pack_id: str) -> None:
        """Waits until the relay of the pack has reserved its range, or is overdue. Raises ``Unavailable`` if the relay
        has failed.
        """
        arena_copies, loop = self.store.arena_copies, asyncio.get_running_loop()
        relay_due = loop.time() + _RELAY_WAIT_S
        failed_before = arena_copies.failed_download(pack_id)
        with self.store.changes.listen() as changed:
            while True:
                changed.clear()
                is_downloading = arena_copies.is_downloading(pack_id)
                slab = self.store.arena.get(pack_id)
                if slab is not None and not slab.error:
                    return
                failed = arena_copies.failed_download(pack_id)
                is_overdue = not is_downloading and loop.time() >= relay_due
                if failed is not None and (is_overdue or failed is not failed_before):
                    raise Unavailable(f"pack {pack_id} is not in the arena: {failed.error}")
                if is_overdue:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(None if is_downloading else relay_due):
                        await changed.wait()

    def _hold_reply(self, slab: Slab, num_segments_ready: int, error: str) -> pb.HoldReply:
        return pb.HoldReply(
            arena_path=str(self.store.arena.path),
            slab_offset=slab.offset,
            slab_bytes=slab.num_slab_bytes,
            num_segments_ready=num_segments_ready,
            error=error,
        )

    async def Relay(self, request: pb.RelayRequest, context: Context) -> pb.RelayReply:
        self.store.epoch.check(request.epoch)
        checked_digest(request.pack_id, "pack_id")
        own_id = self.store.settings.store_id
        sources = tuple(source_address(source) for source in request.sources if source.holder_id != own_id)
        if not sources:
            raise InvalidRequest("sources must name at least one holder other than this store", field="sources")
        plan = DownloadPlan(
            request.pack_id,
            sources,
            request.relay_id,
            request.keep_retained,
            max(request.num_striped, 1),
            TransferClass.IDLE if request.urgency == pb.RELAY_URGENCY_IDLE else TransferClass.URGENT,
        )
        complete = await asyncio.shield(asyncio.wrap_future(self.store.arena_copies.relay(plan)))
        names = [source.holder_id for source in request.sources]
        log.info("relay", pack_id=request.pack_id, relay_id=request.relay_id, sources=names, complete=complete)
        return pb.RelayReply(already_complete=complete)

    async def Drop(self, request: pb.DropRequest, context: Context) -> pb.DropReply:
        self.store.epoch.check(request.epoch)
        checked_digest(request.pack_id, "pack_id")
        dropped = await asyncio.to_thread(self.store.arena_copies.drop, request.pack_id)
        log.info("drop", pack_id=request.pack_id, dropped=dropped)
        return pb.DropReply(dropped=dropped)

    async def Retain(self, request: pb.RetainRequest, context: Context) -> pb.RetainReply:
        self.store.epoch.check(request.epoch)
        if not 0 <= request.lease_s <= _MAX_LEASE_S:
            raise InvalidRequest(f"lease_s must be between 0 and {_MAX_LEASE_S:g}", field="lease_s")
        if self.store.disk is not None and request.disk_pack_ids:
            self.store.disk.eviction_order.renew(request.disk_pack_ids, request.lease_s)
        if self.store.arena.retention.renew(request.pack_ids, request.lease_s):
            self.store.changes.notify()
        return pb.RetainReply()

    async def WatchCopies(
        self, request: pb.WatchCopiesRequest, context: Context
    ) -> AsyncIterator[reports_pb2.StoreReport]:
        self.store.epoch.observe(request.epoch)
        epoch_reported, disk_reported = False, None
        every_s = max(request.beat_every_s, _MIN_REPORT_INTERVAL_S) if request.beat_every_s > 0 else None
        with self.store.changes.listen() as changed:
            changed.set()
            while True:
                if epoch_reported:  # the scheduler has learned the higher epoch
                    self.store.epoch.check(request.epoch)
                epoch_reported = 0 < request.epoch < self.store.epoch.highest
                on_disk = self.store.disk.pack_ids() if self.store.disk is not None else None
                if changed.is_set() or on_disk != disk_reported:
                    changed.clear()
                    yield store_report(self.store, None if on_disk == disk_reported else on_disk)
                    disk_reported = on_disk
                    await asyncio.sleep(_MIN_REPORT_INTERVAL_S)
                else:
                    yield store_beat(self.store)
                with suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await changed.wait()
