"""Packs on this host's disk: copies of what lies in the remote store, the longest unused leaving first.

    <folder>/<pack id>             the pack, each chunk verified when it was written
    <folder>/<pack id>.manifest
    <folder>/drafts/               what is being written; emptied at a start

The folder is the state: what is in it is kept, and a file's time of change is when it was last used. Files appear whole
and durable or not at all; what a disk makes of them later is found by the digests of whoever reads them.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrelay.common.errors import NotFound
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.durable_files import sync_folder
from torchrelay.param_store.remote.file_reader import FileReader, ReadBuffers
from torchrelay.param_store.remote.keys import is_digest
from torchrelay.transfer.manifest import pack_id_of

log = get_logger(__name__)
_RESERVED_DISK_BYTES = 256 << 20
_DEFAULT_LIMIT_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class CachedPack:
    """One pack on disk. ``last_used`` orders them."""

    pack_id: str
    num_bytes: int
    last_used: float


def select_evictions(
    cached: Sequence[CachedPack], num_bytes: int, limit_bytes: int, free_bytes: int
) -> list[CachedPack] | None:
    """Which packs must go so that ``num_bytes`` more fit below the limit and on the disk; None: they never will."""
    excess = max(sum(pack.num_bytes for pack in cached) + num_bytes - limit_bytes, num_bytes - free_bytes)
    gone: list[CachedPack] = []
    for pack in sorted(cached, key=lambda pack: pack.last_used):
        if excess <= 0:
            break
        gone.append(pack)
        excess -= pack.num_bytes
    return gone if excess <= 0 else None


def default_limit_bytes(folder: Path) -> int:
    """What a disk tier in ``folder`` may take by default: half of what is free or its own already, at most 64 GiB."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    own = sum(pack.num_bytes for pack in _packs_in(folder))
    return min((shutil.disk_usage(there).free + own) // 2, _DEFAULT_LIMIT_BYTES)


class DiskCache:
    """Owns the folder. Methods block on the disk and may run on any thread; none raises for what the disk refuses."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._buffers = ReadBuffers()
        self._lock = threading.Lock()
        shutil.rmtree(self.drafts, ignore_errors=True)
        self.drafts.mkdir(parents=True)

    @property
    def drafts(self) -> Path:
        return self._folder / "drafts"

    def packs(self) -> list[CachedPack]:
        return _packs_in(self._folder)

    def has(self, pack_id: str) -> bool:
        return self._pack(pack_id).exists()

    def open(self, pack_id: str) -> FileReader | None:
        """The pack, to be read and verified; None: it is not here. Counts as a use of it."""
        path = self._pack(pack_id)
        try:
            os.utime(path)
            return FileReader(path, path.name, self._buffers)
        except (OSError, NotFound):
            return None

    def manifest(self, pack_id: str) -> bytes | None:
        """The pack's manifest, verified; None: it is not here."""
        try:
            encoded = self._manifest(pack_id).read_bytes()
        except OSError:
            return None
        return encoded if pack_id_of(encoded) == pack_id else None

    def make_room(self, num_bytes: int) -> None:
        """Removes the longest unused packs until ``num_bytes`` more fit. Raises ``OSError`` where they never will."""
        with self._lock:
            free_bytes = shutil.disk_usage(self._folder).free - _RESERVED_DISK_BYTES
            gone = select_evictions(self.packs(), num_bytes, self._limit_bytes, free_bytes)
        if gone is None:
            raise OSError(errno.ENOSPC, f"the disk tier has no room for {num_bytes:,} bytes")
        for pack in gone:
            log.info("disk_pack_evicted", pack_id=pack.pack_id, num_bytes=pack.num_bytes)
            self.discard(pack.pack_id)

    def publish(self, pack_id: str, draft: Path, manifest_draft: Path) -> None:
        """Takes durable drafts in. Raises ``OSError``."""
        manifest_draft.replace(self._manifest(pack_id))
        draft.replace(self._pack(pack_id))
        sync_folder(self._folder)

    def discard(self, pack_id: str) -> None:
        """Removes the pack; who reads it at the moment goes on."""
        for path in (self._pack(pack_id), self._manifest(pack_id)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("disk_pack_not_removed", pack_id=pack_id, error=str(error))

    def _pack(self, pack_id: str) -> Path:
        return self._folder / pack_id

    def _manifest(self, pack_id: str) -> Path:
        return self._folder / f"{pack_id}.manifest"


def _packs_in(folder: Path) -> list[CachedPack]:
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_digest(path.name):
            try:
                known = path.stat()
            except FileNotFoundError:  # discarded just now
                continue
            found.append(CachedPack(path.name, known.st_size, known.st_mtime))
    return found
