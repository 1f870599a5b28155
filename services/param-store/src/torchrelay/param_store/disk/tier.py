"""The remote store behind this host's disk: packs that lie there are read from it, and everything else is passed on.

A chunk of the disk's copy that does not match its digest, or is not there, condemns the copy: it is removed, and that
chunk and all later ones come from the remote store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from torchrelay.common.errors import DataCorrupted
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.disk.cache import DiskCache
from torchrelay.param_store.remote.file_reader import FileReader
from torchrelay.param_store.remote.keys import parse_pack_key
from torchrelay.param_store.remote.remote_store import RangeReader, RemoteStore

log = get_logger(__name__)


class DiskTier(RemoteStore):
    """Reads through ``cache``; writes go to ``remote`` alone. A pack that is here is read while the remote is away."""

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

    def list(self, prefix: str) -> Iterator[str]:
        return self._remote.list(prefix)


class TieredReader(RangeReader):
    """One pack, from its copy on disk for as long as that is good."""

    def __init__(self, copy: FileReader, cache: DiskCache, pack_id: str, remote: RemoteStore, key: str) -> None:
        self._copy = copy
        self._cache = cache
        self._pack_id = pack_id
        self._remote = remote
        self._key = key
        self._origin: RangeReader | None = None  # opened when the copy is found bad
        self._lock = threading.Lock()

    def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        if self._origin is None:
            try:
                self._copy.read_into(offset, view, stop)
                return
            except (DataCorrupted, OSError) as error:
                self._discard_copy(str(error))
        self._from_origin(offset, view, stop)

    def read_again(self, offset: int, view: memoryview, stop: threading.Event) -> bool:
        self._discard_copy(f"the chunk at byte {offset} does not match its digest")
        self._from_origin(offset, view, stop)
        return True

    def _discard_copy(self, reason: str) -> None:
        with self._lock:
            if self._origin is None:
                log.warning("disk_pack_damaged", pack_id=self._pack_id, reason=reason)
                self._cache.discard(self._pack_id)
                self._origin = self._remote.open_range(self._key)

    def _from_origin(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        assert self._origin is not None  # the copy was condemned
        self._origin.read_into(offset, view, stop)

    def close(self) -> None:
        self._copy.close()
        if self._origin is not None:
            self._origin.close()
