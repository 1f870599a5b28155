"""A folder as the remote store: the embedded default, or a network file system."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from torchrelay.common.errors import InvalidRequest, NotFound
from torchrelay.common.ids import new_id
from torchrelay.param_store.durable_files import sync_folder
from torchrelay.param_store.remote.file_reader import FileReader, ReadBuffers
from torchrelay.param_store.remote.remote_store import RangeReader, RemoteOptions, RemoteStore, StoredObject

_DRAFTS = "drafts"
_DRAFT_EXPIRY_S = 86400.0


class FolderStore(RemoteStore):
    """Keys are paths below ``root``. Objects are drafted in ``drafts/`` and renamed into place."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._buffers = ReadBuffers()
        (root / _DRAFTS).mkdir(parents=True, exist_ok=True)
        self._remove_abandoned(time.time())

    @classmethod
    def from_url(cls, url: str, options: RemoteOptions) -> FolderStore:
        """Opens ``file:///an/absolute/folder`` or ``file:a/relative/folder``; no option applies."""
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise InvalidRequest(f"{url!r} does not name a folder of this machine", field="remote_url")
        return cls(Path(unquote(parts.path)))

    def put_file(self, key: str, path: Path) -> None:
        with self._publishing(key) as draft:
            try:
                os.link(path, draft)  # no copy on the same file system
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                    raise
                shutil.copyfile(path, draft)

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._publishing(key) as draft:
            draft.write_bytes(data)

    def get_bytes(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"the remote store has no {key}") from None

    def open_range(self, key: str) -> RangeReader:
        return FileReader(self._path(key), key, self._buffers)

    def size(self, key: str) -> int:
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError:
            raise NotFound(f"the remote store has no {key}") from None

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        folder = self._path(prefix)
        if not folder.is_dir():
            return
        for name in sorted(os.listdir(folder)):
            try:
                status = (folder / name).stat()
            except FileNotFoundError:  # deleted meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                # The inode's change time, since a put links or renames: a staged file's content may be much older.
                yield StoredObject(f"{prefix}{name}", status.st_size, status.st_ctime_ns // 1000)

    def _path(self, key: str) -> Path:
        parts = key.rstrip("/").split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in key:
            raise InvalidRequest(f"{key!r} is not a valid key", field="key")
        return self._root.joinpath(*parts)

    @contextmanager
    def _publishing(self, key: str) -> Iterator[Path]:
        """A draft that the block writes and that becomes the object afterwards."""
        draft = self._root / _DRAFTS / new_id("drf")
        try:
            yield draft
            final = self._path(key)
            final.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(final)
            sync_folder(final.parent)
        finally:
            # NOTE: also after the rename, which has no effect if both are links to the same file.
            draft.unlink(missing_ok=True)

    def _remove_abandoned(self, now_unix_s: float) -> None:
        """Removes old drafts of stores that died while writing; another store may still be writing younger ones."""
        for draft in (self._root / _DRAFTS).iterdir():
            if now_unix_s - draft.stat().st_mtime > _DRAFT_EXPIRY_S and draft.stat().st_nlink == 1:
                draft.unlink(missing_ok=True)
