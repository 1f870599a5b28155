"""What a store does without being asked: reports on NATS, stale uploads, pins of workers that do not come back."""

from __future__ import annotations

import asyncio
import time

import nats.errors

from torchrelay.common.events import Subjects, connect
from torchrelay.common.telemetry import get_logger
from torchrelay.param_store.recovery import release_unmapped
from torchrelay.param_store.store import Store

log = get_logger(__name__)
REPORT_EVERY_S = 0.1
EXPIRE_EVERY_S = 60.0


async def publish_reports(store: Store) -> None:
    """Publishes ten reports a second until cancelled; while NATS is away they are simply missed."""
    settings = store.settings
    subject = Subjects(settings.nats_prefix).store_load(settings.store_id)
    client = await connect(settings.nats_url, settings.store_id)
    try:
        while True:
            try:
                await client.publish(subject, store.report().SerializeToString())
            except (nats.errors.Error, OSError) as error:
                log.debug("report_not_published", error=str(error))
            await asyncio.sleep(REPORT_EVERY_S)
    finally:
        await client.close()


async def expire_uploads(store: Store) -> None:
    """Removes uploads that nobody touched for the expiry time, until cancelled."""
    while True:
        await asyncio.to_thread(store.uploads.expire, time.time())
        await asyncio.sleep(min(EXPIRE_EVERY_S, store.settings.upload_expiry_s))


async def release_recovered(store: Store) -> None:
    """After the grace: packs of an earlier process that no worker holds again, nor still maps, may be evicted."""
    left = True
    while left:
        await asyncio.sleep(store.settings.recovery_grace_s)
        left = await asyncio.to_thread(release_unmapped, store.arena)
        store.changes.notify()
