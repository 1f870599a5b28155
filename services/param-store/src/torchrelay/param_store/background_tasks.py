"""The store's background tasks: reports on NATS, upload expiry, recovered pins, the disk cache."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

from torchrelay.common.net import load_reports
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.copies.recovery import release_unmapped
from torchrelay.param_store.copies.transfer_counts import REMOTE
from torchrelay.param_store.disk.cache_writer import write_to_cache
from torchrelay.param_store.disk.disk_cache import DiskCache
from torchrelay.param_store.grpc.messages import store_report
from torchrelay.param_store.store import Store
from torchrelay.transfer.arena.slab import Slab

log = get_logger(__name__)
EXPIRY_INTERVAL_S = 60.0
_DISK_SCAN_INTERVAL_S = 0.2


async def publish_reports(store: Store) -> None:
    """Publishes reports until cancelled; reports are lost while NATS is unreachable."""
    settings = store.settings
    subject = Subjects(settings.nats_prefix).store_load(settings.store_id)
    client = await connect(settings.nats_url, settings.store_id)
    try:
        node_key = bytes.fromhex(settings.node_key)
        await load_reports.publish_reports(client, subject, node_key, store.activity, partial(store_report, store))
    finally:
        await client.close()


async def expire_uploads(store: Store) -> None:
    """Removes uploads left untouched for the expiry time, until cancelled."""
    while True:
        await asyncio.to_thread(store.uploads.expire, time.time())
        await asyncio.sleep(min(EXPIRY_INTERVAL_S, store.settings.upload_expiry_s))


async def release_recovered(store: Store) -> None:
    """After the grace period, unpins the packs of an earlier process that no worker holds or maps."""
    any_mapped = True
    while any_mapped:
        await asyncio.sleep(store.settings.recovery_grace_s)
        any_mapped = await asyncio.to_thread(release_unmapped, store.arena)
        store.changes.notify()


async def fill_disk_cache(store: Store) -> None:
    """Writes packs from the remote store to the disk cache, one at a time, until cancelled."""
    if store.disk is None:
        return
    tried: dict[str, Slab] = {}  # one try per download, so that a full disk is not retried forever
    with store.changes.listen() as changed:
        while True:
            changed.clear()
            ids = {copy.record.pack_id for copy in store.arena_copies.copies() if copy.record.source == REMOTE}
            slabs = {slab.pack_id: slab for slab in store.arena.slabs() if slab.pack_id in ids and slab.complete}
            for slab in slabs.values():
                if tried.get(slab.pack_id) is not slab:
                    await _write(store.disk, slab)
                    store.changes.notify()
            tried = slabs
            await asyncio.sleep(_DISK_SCAN_INTERVAL_S)
            await changed.wait()


async def _write(cache: DiskCache, slab: Slab) -> None:
    stop = threading.Event()
    if cache.has(slab.pack_id):
        return
    writing = asyncio.get_running_loop().run_in_executor(None, write_to_cache, cache, slab, stop)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        stop.set()
        await writing
        raise
