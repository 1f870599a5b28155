"""Packs cached on this host's disk. Packs that the scheduler has ranked are evicted last, in the order of their ranks;
all other packs are evicted before them, the least recently used first.

    <folder>/<pack id>             the pack, whose chunks were verified before it was written
    <folder>/<pack id>.manifest
    <folder>/drafts/               files being written; emptied at start

The folder is the state, and a file's modification time its last use. Files appear complete and durable or not at all.
Readers check digests, and so notice later damage by the disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrelay.common.errors import NotFound
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.durable_files import sync_folder
from torchrelay.param_store.remote.file_reader import FileReader, ReadBuffers
from torchrelay.param_store.remote.keys import is_digest
from torchrelay.transfer.arena.retention import RetentionLease
from torchrelay.transfer.manifest import pack_id_of

log = get_logger(__name__)
_RESERVED_DISK_BYTES = 256 << 20
_MAX_REPORTED_PACKS = 1024


@dataclass(frozen=True, slots=True)
class CachedPack:
    """A pack on disk."""

    pack_id: str
    num_bytes: int
    last_used: float


def select_evictions(
    cached: Sequence[CachedPack],
    num_bytes: int,
    limit_bytes: int,
    free_bytes: int,
    ranks: Mapping[str, int],
) -> list[CachedPack] | None:
    """The packs to evict so that ``num_bytes`` more fit below the limit and on the disk; None: they never fit.

    ``ranks``: the eviction order of ranked packs, which are evicted after all others.
    """
    excess = max(sum(pack.num_bytes for pack in cached) + num_bytes - limit_bytes, num_bytes - free_bytes)
    evicted: list[CachedPack] = []
    for pack in sorted(cached, key=lambda pack: (ranks.get(pack.pack_id, -1), pack.last_used)):
        if excess <= 0:
            break
        evicted.append(pack)
        excess -= pack.num_bytes
    return evicted if excess <= 0 else None


def default_limit_bytes(folder: Path) -> int:
    """The default limit of ``folder``: half of the space that is free or already its own."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    own = sum(pack.num_bytes for pack in _packs_in(folder))
    return (shutil.disk_usage(existing).free + own) // 2


class DiskCache:
    """The cache, which owns its folder. Methods block on the disk and may run on any thread."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._buffers = ReadBuffers()
        self._lock = threading.Lock()  # keeps the folder and ``_pack_ids`` consistent
        self.eviction_order = RetentionLease()
        self.num_evictions = 0
        shutil.rmtree(self.drafts, ignore_errors=True)
        self.drafts.mkdir(parents=True)
        # Least recently used first; replaced as a whole, so that readers need no lock and never wait for the disk.
        self._pack_ids = tuple(pack.pack_id for pack in sorted(self.packs(), key=lambda pack: pack.last_used))

    @property
    def drafts(self) -> Path:
        return self._folder / "drafts"

    def packs(self) -> list[CachedPack]:
        return _packs_in(self._folder)

    def pack_ids(self) -> frozenset[str]:
        """The most recently used packs, up to the number that is reported. Never blocks."""
        return frozenset(self._pack_ids[-_MAX_REPORTED_PACKS:])

    def has(self, pack_id: str) -> bool:
        return self._pack(pack_id).exists()

    def open(self, pack_id: str) -> FileReader | None:
        """A reader of the pack, which counts as a use; None: the pack is not cached."""
        path = self._pack(pack_id)
        with self._lock:
            try:
                os.utime(path)
                reader = FileReader(path, path.name, self._buffers)
            except (FileNotFoundError, NotFound):
                self._pack_ids = self._without(pack_id)
                return None
            except OSError as error:
                log.warning("disk_pack_not_read", pack_id=pack_id, error=str(error))
                return None
            self._pack_ids = (*self._without(pack_id), pack_id)
            return reader

    def manifest(self, pack_id: str) -> bytes | None:
        """The pack's verified manifest; None: the pack is not cached."""
        try:
            encoded = self._manifest(pack_id).read_bytes()
        except OSError:
            return None
        return encoded if pack_id_of(encoded) == pack_id else None

    def free_space(self, num_bytes: int) -> None:
        """Evicts packs until ``num_bytes`` more fit. Raises ``OSError`` if they never fit."""
        free_bytes = shutil.disk_usage(self._folder).free - _RESERVED_DISK_BYTES
        evicted = select_evictions(self.packs(), num_bytes, self._limit_bytes, free_bytes, self.eviction_order.ranks)
        if evicted is None:
            raise OSError(errno.ENOSPC, f"the disk cache has no space for {num_bytes:,} bytes")
        for pack in evicted:
            log.info("disk_pack_evicted", pack_id=pack.pack_id, num_bytes=pack.num_bytes)
            self.num_evictions += 1
            self.discard(pack.pack_id)

    def publish(self, pack_id: str, draft: Path, manifest_draft: Path) -> None:
        """Moves durable drafts into place. Raises ``OSError``."""
        with self._lock:
            manifest_draft.replace(self._manifest(pack_id))
            draft.replace(self._pack(pack_id))
            self._pack_ids = (*self._without(pack_id), pack_id)
        sync_folder(self._folder)

    def discard(self, pack_id: str) -> None:
        """Removes the pack; open readers keep reading."""
        with self._lock:
            self._pack_ids = self._without(pack_id)
            for path in (self._pack(pack_id), self._manifest(pack_id)):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("disk_pack_not_removed", pack_id=pack_id, error=str(error))

    def _without(self, pack_id: str) -> tuple[str, ...]:
        return tuple(other for other in self._pack_ids if other != pack_id)

    def _pack(self, pack_id: str) -> Path:
        return self._folder / pack_id

    def _manifest(self, pack_id: str) -> Path:
        return self._folder / f"{pack_id}.manifest"


def _packs_in(folder: Path) -> list[CachedPack]:
    packs = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_digest(path.name):
            try:
                status = path.stat()
            except FileNotFoundError:  # discarded meanwhile
                continue
            packs.append(CachedPack(path.name, status.st_size, status.st_mtime))
    return packs
