"""All open uploads: begun by the gateway, found again after a restart, removed when abandoned."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from torchrelay.common.disk import free_bytes, write_error
from torchrelay.common.errors import Conflict, DiskFull, InvalidRequest, NotFound
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.uploads.declared_files import DeclaredFile, check_declared
from torchrelay.param_store.uploads.staged_upload import StagedUpload, UploadRecord

log = get_logger(__name__)
_UPLOAD_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESERVED_DISK_BYTES = 32 << 20  # for the ledger and logs, which may share the disk


class StagingArea:
    """The staging folder of a store. Methods block on the disk and may run on any thread."""

    def __init__(self, root: Path, max_upload_bytes: int, expiry_s: float) -> None:
        self._root = root
        self._max_upload_bytes = max_upload_bytes
        self._expiry_s = expiry_s
        self._uploads: dict[str, StagedUpload] = {}
        self._lock = threading.Lock()
        root.mkdir(parents=True, exist_ok=True)
        for folder in root.iterdir():
            self._find(folder)

    def _find(self, folder: Path) -> None:
        try:
            upload = StagedUpload.load(folder)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("upload_unreadable", folder=folder.name, error=str(error))
            shutil.rmtree(folder, ignore_errors=True)
            return
        upload.end_commit()  # removes drafts of a packer that died with the store
        self._uploads[upload.record.upload_id] = upload

    @property
    def num_open(self) -> int:
        return sum(not upload.record.version_id for upload in list(self._uploads.values()))

    def begin(self, upload_id: str, tenant_id: str, files: Sequence[DeclaredFile], quota_bytes: int) -> StagedUpload:
        """Raises ``UploadRefused`` or ``QuotaExceeded`` for a wrong declaration, ``DiskFull`` without disk space."""
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise InvalidRequest("upload_id must be 1 to 64 letters, digits, '-' or '_'", field="upload_id")
        check_declared(files, quota_bytes, self._max_upload_bytes)
        record = UploadRecord(upload_id, tenant_id, tuple(files))
        with self._lock:
            existing = self._uploads.get(upload_id)
            if existing is None:
                self._check_room(sum(file.num_bytes for file in files))
                try:
                    self._uploads[upload_id] = StagedUpload.begin(self._root / upload_id, record)
                except OSError as error:
                    raise write_error(error, "the store cannot begin the upload", self._root) from error
            elif (existing.record.tenant_id, existing.record.files) != (record.tenant_id, record.files):
                raise Conflict("an upload with this id was begun with other files", field="upload_id")
            return self._uploads[upload_id]

    def _check_room(self, num_bytes: int) -> None:
        free = max(free_bytes(self._root) - _RESERVED_DISK_BYTES, 0)
        needed = 2 * num_bytes  # the upload, and its pack
        if needed > free:
            raise DiskFull(
                f"the disk of {self._root} has room for {free:,} bytes and the upload needs {needed:,}, for its files "
                "and the pack made of them"
            )

    def get(self, upload_id: str) -> StagedUpload:
        upload = self._uploads.get(upload_id)
        if upload is None:
            raise NotFound(f"there is no upload {upload_id!r}; it may have expired", field="upload_id")
        return upload

    def abort(self, upload_id: str) -> None:
        """Removes the upload and its bytes; without effect if there is none."""
        upload = self._uploads.get(upload_id)
        if upload is not None:
            upload.remove()
            with self._lock:
                self._uploads.pop(upload_id, None)

    def expire(self, now_unix_s: float) -> list[str]:
        """Removes uploads left untouched for the expiry time; returns their ids."""
        expired = []
        for upload in list(self._uploads.values()):
            upload_id = upload.record.upload_id
            if now_unix_s - upload.last_touched_unix_s() <= self._expiry_s:
                continue
            with suppress(Conflict):  # it is being committed, so it is in use
                self.abort(upload_id)
                expired.append(upload_id)
                log.info("upload_expired", upload_id=upload_id)
        return expired
