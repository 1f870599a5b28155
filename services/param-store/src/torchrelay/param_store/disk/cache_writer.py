"""Copies packs from the arena to the disk cache, in the background."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.disk.disk_cache import DiskCache
from torchrelay.param_store.durable_files import write_all
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.manifest import MAX_CHUNK_BYTES

log = get_logger(__name__)
_OWNER = "disk"
_SYNC_EVERY_BYTES = 64 << 20  # bounds the dirty pages in the page cache


def write_to_cache(cache: DiskCache, slab: Slab, stop: threading.Event) -> bool:
    """Writes a complete slab's pack durably, at the disk's speed.

    Returns False and leaves no files when the disk is full or faulty, the slab was dropped, or ``stop`` was set.
    """
    draft = cache.drafts / slab.pack_id
    manifest_draft = draft.with_suffix(".manifest")
    try:
        cache.free_space(slab.num_bytes + len(slab.head))
        _write(draft, slab, stop)
        manifest_draft.write_bytes(slab.head)
        cache.publish(slab.pack_id, draft, manifest_draft)
    except (OSError, TorchrelayError) as error:
        log.warning("pack_not_written_to_disk", pack_id=slab.pack_id, error=str(error))
        return False
    finally:
        _remove(draft, manifest_draft)
    log.info("pack_written_to_disk", pack_id=slab.pack_id, num_bytes=slab.num_bytes)
    return True


def _write(draft: Path, slab: Slab, stop: threading.Event) -> None:
    buffer = memoryview(bytearray(MAX_CHUNK_BYTES))
    with draft.open("wb", buffering=0) as opened:
        file = opened.fileno()
        os.posix_fallocate(file, 0, slab.num_bytes)  # fails now if the disk is too full
        synced = 0
        for index in range(slab.num_chunks):
            if stop.is_set():
                raise Unavailable("the store is closing")
            span = slab.manifest.chunk_range(index)
            piece = buffer[: span.end - span.begin]
            # Pinned for one chunk only, so that drops and evictions do not wait for the disk.
            slab.acquire(_OWNER)
            try:
                piece[:] = slab.chunk(index)
            finally:
                slab.release(_OWNER)
            write_all(file, piece)
            if span.end - synced >= _SYNC_EVERY_BYTES:
                os.fdatasync(file)
                os.posix_fadvise(file, synced, span.end - synced, os.POSIX_FADV_DONTNEED)
                synced = span.end
        os.fsync(file)


def _remove(*drafts: Path) -> None:
    for draft in drafts:
        try:
            draft.unlink(missing_ok=True)
        except OSError as error:
            log.warning("draft_not_removed", draft=draft.name, error=str(error))
