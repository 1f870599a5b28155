"""All uploads of a store: begun by the gateway, loaded again after a restart, removed when abandoned.

A refused upload has ended; its complete files are kept for an hour, or until the disk space is needed, and the tenant's
next upload reuses those that it declares identically. A published upload is kept as a record until the gateway confirms
it by an abort, since SQL may not name its version yet.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from torchrelay.common.errors import Conflict, DiskFull, InvalidRequest, NotFound, Overloaded
from torchrelay.common.host.disk import free_bytes, write_error
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.uploads.declared_files import DeclaredFile, check_declared
from torchrelay.param_store.uploads.staged_upload import Content, StagedUpload, UploadRecord

log = get_logger(__name__)
_UPLOAD_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESERVED_DISK_BYTES = 32 << 20  # for the ledger and logs, which may share the disk
_REFUSED_EXPIRY_S = 3600.0


class StagingArea:
    """The staging folder of a store. Methods block on the disk and may run on any thread."""

    def __init__(self, root: Path, max_upload_bytes: int, expiry_s: float, max_open: int = 256) -> None:
        self._root = root
        self._max_upload_bytes = max_upload_bytes
        self._max_open = max_open
        self._expiry_s = expiry_s
        self._uploads: dict[str, StagedUpload] = {}
        self._lock = threading.Lock()
        root.mkdir(parents=True, exist_ok=True)
        for folder in root.iterdir():
            self._load(folder)

    def _load(self, folder: Path) -> None:
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
        return sum(upload.is_open for upload in list(self._uploads.values()))

    def claims(self) -> dict[str, list[str]]:
        """The uploads that have published a version or are publishing it, by version."""
        claims: dict[str, list[str]] = {}
        for upload in list(self._uploads.values()):
            if version_id := upload.claimed_version:
                claims.setdefault(version_id, []).append(upload.record.upload_id)
        return claims

    def begin(self, upload_id: str, tenant_id: str, files: Sequence[DeclaredFile], quota_bytes: int) -> StagedUpload:
        """Begins an upload. Raises ``UploadRefused`` or ``QuotaExceeded`` for an invalid declaration, ``DiskFull``
        without disk space, ``Overloaded`` with too many open uploads.
        """
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise InvalidRequest("upload_id must be 1 to 64 letters, digits, '-' or '_'", field="upload_id")
        check_declared(files, quota_bytes, self._max_upload_bytes)
        record = UploadRecord(upload_id, tenant_id, tuple(files))
        with self._lock:
            existing = self._uploads.get(upload_id)
            if existing is None:
                if self.num_open >= self._max_open:
                    raise Overloaded(f"the store has {self.num_open} open uploads; try again later", retry_after_s=60.0)
                self._free_space(files, tenant_id)
                try:
                    known = self._known_files(tenant_id)
                    self._uploads[upload_id] = StagedUpload.begin(self._root / upload_id, record, known)
                except OSError as error:
                    raise write_error(error, "the store cannot begin the upload", self._root) from error
                self._remove(self._refused(tenant_id))  # their files are linked or not needed
            elif (existing.record.tenant_id, existing.record.files) != (record.tenant_id, record.files):
                raise Conflict("an upload with this id was begun with other files", field="upload_id")
            return self._uploads[upload_id]

    def refuse(self, upload: StagedUpload) -> None:
        """Ends an upload that the packer refused; only the files of a tenant's last refused upload are kept."""
        with self._lock:
            self._remove(self._refused(upload.record.tenant_id))
        upload.end_refused()

    def _known_files(self, tenant_id: str) -> dict[Content, Path]:
        own = (upload for upload in self._uploads.values() if upload.record.tenant_id == tenant_id)
        return {content: path for upload in own for content, path in upload.complete_files().items()}

    def _refused(self, tenant_id: str | None = None) -> list[StagedUpload]:
        """The refused uploads of a tenant; None: of all tenants."""
        refused = (upload for upload in self._uploads.values() if upload.record.refused)
        return [upload for upload in refused if tenant_id in (None, upload.record.tenant_id)]

    def _remove(self, uploads: Sequence[StagedUpload]) -> None:
        for upload in uploads:
            upload.remove()
            del self._uploads[upload.record.upload_id]

    def _free_space(self, files: Sequence[DeclaredFile], tenant_id: str) -> None:
        if self._needed_bytes(files, tenant_id) > self._free_bytes():  # remove refused uploads of other tenants first
            self._remove([upload for upload in self._refused() if upload.record.tenant_id != tenant_id])
        if self._needed_bytes(files, tenant_id) > self._free_bytes():  # then its own, which it may have to send again
            self._remove(self._refused(tenant_id))
        needed = self._needed_bytes(files, tenant_id)
        if needed > (free := max(self._free_bytes(), 0)):
            raise DiskFull(
                f"the disk of {self._root} has {free:,} bytes left and the upload needs {needed:,}, for its files and "
                "the pack made of them"
            )

    def _needed_bytes(self, files: Sequence[DeclaredFile], tenant_id: str) -> int:
        """The bytes that the upload and its pack need. Reused files are linked, which needs no space."""
        known = self._known_files(tenant_id)
        return sum(file.num_bytes * (1 if (file.sha256, file.num_bytes) in known else 2) for file in files)

    def _free_bytes(self) -> int:
        """The disk space for a new upload, less the bytes that open uploads have declared and not sent yet."""
        outstanding = 0
        for upload in self._uploads.values():
            if upload.is_open:
                received = sum(progress.num_bytes_received for progress in upload.progress())
                outstanding += 2 * upload.num_bytes - received
        return free_bytes(self._root) - _RESERVED_DISK_BYTES - outstanding

    def get(self, upload_id: str) -> StagedUpload:
        upload = self._uploads.get(upload_id)
        if upload is None:
            raise NotFound(f"there is no upload {upload_id!r}; it may have expired", field="upload_id")
        return upload

    def abort(self, upload_id: str) -> None:
        """Removes the upload and its bytes; no effect if there is none."""
        upload = self._uploads.get(upload_id)
        if upload is not None:
            upload.remove()
            with self._lock:
                self._uploads.pop(upload_id, None)

    def expire(self, now_unix_s: float) -> list[str]:
        """Removes uploads that were untouched for the expiry time; returns their ids."""
        expired = []
        for upload in list(self._uploads.values()):
            upload_id = upload.record.upload_id
            expiry_s = min(self._expiry_s, _REFUSED_EXPIRY_S) if upload.record.refused else self._expiry_s
            if upload.claimed_version or now_unix_s - upload.last_touched_unix_s() <= expiry_s:
                continue
            with suppress(Conflict):  # it is being committed
                self.abort(upload_id)
                expired.append(upload_id)
                log.info("upload_expired", upload_id=upload_id)
        return expired
