"""A remote store that reads packs from this host's disk cache where it can.

When a chunk of the cached copy is missing or does not match its digest, the copy is discarded: that chunk and all later
chunks come from the remote store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from torchrelay.common.errors import DataCorrupted
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.disk.disk_cache import DiskCache
from torchrelay.param_store.remote.file_reader import FileReader
from torchrelay.param_store.remote.keys import parse_pack_key
from torchrelay.param_store.remote.remote_store import RangeReader, RemoteStore, StoredObject

log = get_logger(__name__)


class DiskTier(RemoteStore):
    """Reads through ``cache``, writes to ``remote`` only. Cached packs stay readable while ``remote`` is down."""

    def __init__(self, remote: RemoteStore, cache: DiskCache) -> None:
        self._remote = remote
        self._cache = cache

    def put_file(self, key: str, path: Path) -> None:
        self._remote.put_file(key, path)

    def put_bytes(self, key: str, data: bytes) -> None:
        self._remote.put_bytes(key, data)

    def get_bytes(self, key: str) -> bytes:
        pack_id, is_manifest = parse_pack_key(key)
        cached = self._cache.manifest(pack_id) if is_manifest else None
        return self._remote.get_bytes(key) if cached is None else cached

    def open_range(self, key: str) -> RangeReader:
        pack_id, is_manifest = parse_pack_key(key)
        copy = self._cache.open(pack_id) if pack_id and not is_manifest else None
        if copy is None:
            return self._remote.open_range(key)
        return TieredReader(copy, self._cache, pack_id, self._remote, key)

    def size(self, key: str) -> int:
        return self._remote.size(key)

    def delete(self, key: str) -> None:
        self._remote.delete(key)
        pack_id, _ = parse_pack_key(key)
        if pack_id:
            self._cache.discard(pack_id)

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        return self._remote.objects(prefix)


class TieredReader(RangeReader):
    """Reads a pack from its copy on disk until a chunk of the copy proves damaged."""

    def __init__(self, copy: FileReader, cache: DiskCache, pack_id: str, remote: RemoteStore, key: str) -> None:
        self._copy = copy
        self._cache = cache
        self._pack_id = pack_id
        self._remote = remote
        self._key = key
        self._origin: RangeReader | None = None  # opened when the copy proves damaged
        self._lock = threading.Lock()

    @property
    def is_cached(self) -> bool:
        return self._origin is None

    def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        if self._origin is None:
            try:
                self._copy.read_into(offset, view, stop)
            except (DataCorrupted, OSError) as error:
                self._discard_copy(str(error)).read_into(offset, view, stop)
        else:
            self._origin.read_into(offset, view, stop)

    def read_again(self, offset: int, view: memoryview, stop: threading.Event) -> bool:
        self._discard_copy(f"the chunk at byte {offset} does not match its digest").read_into(offset, view, stop)
        return True

    def _discard_copy(self, reason: str) -> RangeReader:
        """Discards the copy; returns the reader of the remote store's pack, which replaces it."""
        with self._lock:
            if self._origin is None:
                log.warning("disk_pack_damaged", pack_id=self._pack_id, reason=reason)
                self._cache.discard(self._pack_id)
                self._origin = self._remote.open_range(self._key)
            return self._origin

    def close(self) -> None:
        self._copy.close()
        if self._origin is not None:
            self._origin.close()
