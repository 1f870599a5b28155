"""Writes and digests one file of an upload.

The digest continues from call to call; the bytes of earlier calls are read again only after a restart.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torchrelay.common.errors import Conflict, UploadRefused
from torchrelay.param_store.durable_files import write_all
from torchrelay.param_store.uploads.declared_files import DeclaredFile

_READ_BYTES = 1 << 20


@dataclass(slots=True)
class FileDigest:
    """The SHA-256 of the first bytes of a file."""

    num_bytes: int = 0
    state: hashlib._Hash = field(default_factory=hashlib.sha256)

    def update(self, data: bytes | memoryview) -> None:
        self.state.update(data)
        self.num_bytes += len(data)


class FileWriter:
    """Appends to a file and digests it. ``close`` may be called from any thread, at any time, repeatedly."""

    def __init__(
        self,
        path: Path,
        declared: DeclaredFile,
        num_bytes_received: int,
        digest: FileDigest,
        on_complete: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        """``path`` already has ``num_bytes_received``; ``digest`` covers all or none of them. ``on_complete`` is called
        once the file is complete and durable.
        """
        self._path, self._declared = path, declared
        self._num_bytes = num_bytes_received
        self._on_complete, self._on_close = on_complete, on_close
        self._digest = digest
        self._file = path.open("ab", buffering=0)
        self._closed = False
        self._lock = threading.Lock()

    @property
    def must_resume(self) -> bool:
        """Whether bytes on disk are not digested, since they were received before the store was restarted."""
        return self._digest.num_bytes < self._num_bytes

    def resume(self) -> None:
        """Digests them, at about a gigabyte per second."""
        with self._path.open("rb", buffering=0) as stored:
            buffer = memoryview(bytearray(_READ_BYTES))
            stored.seek(self._digest.num_bytes)
            while self.must_resume and not self._closed:
                count = stored.readinto(buffer[: min(self._num_bytes - self._digest.num_bytes, _READ_BYTES)])
                if not count:
                    raise Conflict(f"{self._declared.path}: the upload has ended", field="upload_id")
                self._digest.update(buffer[:count])

    def write(self, data: bytes) -> None:
        """Appends ``data``, which the declared size must have left. Raises ``Conflict`` after ``close``."""
        with self._lock:
            if self._closed:
                raise Conflict(f"{self._declared.path}: the upload has ended", field="upload_id")
            assert self._num_bytes + len(data) <= self._declared.num_bytes, "the caller bounds the bytes"
            write_all(self._file.fileno(), data)
            self._digest.update(data)
            self._num_bytes += len(data)

    def finish(self) -> None:
        """Ends the call. Once all bytes have arrived, checks the digest and makes the file durable.

        Raises ``UploadRefused`` if the digest differs; then drops the bytes, and the file can be sent again.
        """
        with self._lock:
            if self._closed or self._num_bytes < self._declared.num_bytes:
                return
            digest = self._digest.state.hexdigest()
            if digest != self._declared.sha256:
                self._file.truncate(0)
                raise UploadRefused(
                    f"{self._declared.path}: its SHA-256 is {digest} and {self._declared.sha256} was declared; "
                    "the bytes were dropped, send the file again",
                    field=self._declared.path,
                )
            os.fsync(self._file.fileno())
            self._on_complete()

    def close(self) -> None:
        """Closes the file; the bytes written and their digest are kept."""
        self._closed = True  # ends a resume
        with self._lock:
            self._file.close()
        self._on_close()
