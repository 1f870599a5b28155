"""An upload on disk: its folder with ``state.json`` and the bytes received so far, and its writers."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchrelay.common.errors import Conflict, NotFound
from torchrelay.param_store.durable_files import write_durably
from torchrelay.param_store.model_files import ADAPTER_CONFIG, CONFIG, TOKENIZER, TOKENIZER_CONFIG
from torchrelay.param_store.uploads.declared_files import DeclaredFile, is_weights
from torchrelay.param_store.uploads.file_writer import FileDigest, FileWriter

_REPLACEABLE = (CONFIG, TOKENIZER, TOKENIZER_CONFIG)  # files that the packer may complete, beside the pack
Content = tuple[str, int]  # SHA-256 and size of a file


class UploadRecord(msgspec.Struct, frozen=True):
    """The content of state.json. The number of received bytes of a file is its length on disk."""

    upload_id: str
    tenant_id: str
    files: tuple[DeclaredFile, ...]
    complete: tuple[str, ...] = ()
    publishing: str = ""  # the version that a commit is about to make visible, or has made visible
    version_id: str = ""  # the published version; then the files are removed
    quantize: str = ""  # of its last commit
    refused: bool = False  # ended; its complete files are kept for a while for the tenant's next upload


@dataclass(frozen=True, slots=True)
class FileProgress:
    path: str
    num_bytes: int
    num_bytes_received: int
    complete: bool
    sha256: str


class StagedUpload:
    """The folder of an upload, with its files below ``files/``. Methods may run on any thread.

    open --begin_commit--> committing --end_commit(version)--> published --remove--> gone
     |                       |    `----end_commit()----> open
     `--remove--> gone       `--end_refused--> refused --remove--> gone
    """

    def __init__(self, folder: Path, record: UploadRecord) -> None:
        self.folder = folder
        self.record = record
        self.committing = False
        self._writers: dict[str, FileWriter] = {}
        self._digests: dict[str, FileDigest] = {}  # of files that are incomplete
        self._aborted = False
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, folder: Path, record: UploadRecord, known: Mapping[Content, Path]) -> StagedUpload:
        """Creates the folder. ``known`` files, complete in the tenant's other uploads, need not be sent again."""
        (folder / "files").mkdir(parents=True, exist_ok=True)  # an earlier attempt may have failed here on a full disk
        complete = []
        for file in record.files:
            (folder / "files" / file.path).parent.mkdir(exist_ok=True)
            if path := known.get((file.sha256, file.num_bytes)):
                with suppress(OSError):  # if it was removed meanwhile, the client sends it again
                    os.link(path, folder / "files" / file.path)
                    complete.append(file.path)
        upload = cls(folder, record)
        upload._save(msgspec.structs.replace(record, complete=tuple(complete)))
        return upload

    @classmethod
    def load(cls, folder: Path) -> StagedUpload:
        """Loads an upload. Raises ``OSError`` or ``msgspec.DecodeError`` if the folder is not an upload."""
        return cls(folder, msgspec.json.decode((folder / "state.json").read_bytes(), type=UploadRecord))

    @property
    def is_open(self) -> bool:
        return not self.record.version_id and not self.record.refused

    @property
    def claimed_version(self) -> str:
        """The version that it has published or is publishing; empty: none."""
        return self.record.version_id or self.record.publishing

    @property
    def is_adapter(self) -> bool:
        return any(file.path == ADAPTER_CONFIG for file in self.record.files)

    @property
    def num_bytes(self) -> int:
        """The declared size of all files."""
        return sum(file.num_bytes for file in self.record.files)

    def complete_files(self) -> dict[Content, Path]:
        if self.record.version_id:
            return {}
        complete = set(self.record.complete)
        files = (file for file in self.record.files if file.path in complete)
        return {(file.sha256, file.num_bytes): self.files / file.path for file in files}

    @property
    def files(self) -> Path:
        return self.folder / "files"

    @property
    def pack_path(self) -> Path:
        return self.folder / "draft.pack"

    def published_files(self) -> dict[str, Path]:
        """The files of the version by name, without the weights; the packer has replaced some."""
        replaced = {name: self.folder / name for name in _REPLACEABLE if (self.folder / name).exists()}
        names = [file.path for file in self.record.files if not is_weights(file.path)]
        return {name: self.files / name for name in names} | replaced

    def progress(self) -> list[FileProgress]:
        return [self.file_progress(file.path) for file in self.record.files]

    def file_progress(self, path: str) -> FileProgress:
        file = self.declared(path)
        is_complete = path in self.record.complete
        num_received = file.num_bytes if is_complete else _size_and_mtime(self.files / path)[0]
        return FileProgress(path, file.num_bytes, num_received, is_complete, file.sha256)

    def declared(self, path: str) -> DeclaredFile:
        for file in self.record.files:
            if file.path == path:
                return file
        raise NotFound(f"{path} is not a declared file", field=path)

    def last_touched_unix_s(self) -> float:
        paths = [self.folder / "state.json", *(self.files / file.path for file in self.record.files)]
        return max(_size_and_mtime(path)[1] for path in paths)

    def open_file(self, path: str, offset: int) -> FileWriter | None:
        """A writer that continues at ``offset``, the number of bytes received so far; None: the file is complete.

        A complete file may also be sent again from its beginning, as plain clients do.
        """
        with self._lock:
            progress = self.file_progress(path)
            is_sent_again = progress.complete and not offset
            if self._aborted or not self.is_open or (self.committing and not is_sent_again):
                raise Conflict(
                    "the upload accepts no more bytes: it is being committed or has ended", field="upload_id"
                )
            if path in self._writers:
                raise Conflict(f"{path}: another call is sending this file", field="path")
            if offset != progress.num_bytes_received and not is_sent_again:
                message = f"{path} continues at offset {progress.num_bytes_received}, not {offset}"
                raise Conflict(message, field="Upload-Offset")
            if progress.complete:
                return None
            digest = self._digests.get(path)
            if digest is None or digest.num_bytes > offset:  # it covers bytes that were dropped
                digest = self._digests[path] = FileDigest()
            writer = self._writers[path] = FileWriter(
                self.files / path,
                self.declared(path),
                offset,
                digest,
                on_complete=lambda: self._completed(path),
                on_close=lambda: self._writer_closed(path),
            )
            return writer

    def begin_commit(self, quantize: str = "") -> None:
        """Begins a commit. Raises ``Conflict`` if a commit is running, or with the first incomplete file."""
        for progress in self.progress():
            if not progress.complete:
                have, need = progress.num_bytes_received, progress.num_bytes
                raise Conflict(
                    f"{progress.path}: the file is not complete: {have:,} of {need:,} bytes have arrived",
                    field=progress.path,
                )
        with self._lock:
            if self.committing or self._aborted or not self.is_open:
                raise Conflict("the upload is being committed or has ended", field="upload_id")
            self.committing = True
            self.record = msgspec.structs.replace(self.record, quantize=quantize)

    def claim(self, version_id: str) -> None:
        """Records the version that the running commit is about to make visible."""
        with self._lock:
            self._save(msgspec.structs.replace(self.record, publishing=version_id))

    def end_commit(self, version_id: str = "") -> None:
        """Ends a commit. Records a published version and removes the files; without a version the upload stays open."""
        with self._lock:
            if version_id and not self._aborted:
                self._save(msgspec.structs.replace(self.record, version_id=version_id, publishing=""))
                shutil.rmtree(self.files, ignore_errors=True)
            self._end_commit()

    def end_refused(self) -> None:
        """Ends an upload that the packer refused, and keeps only its complete files."""
        with self._lock:
            self._save(msgspec.structs.replace(self.record, refused=True))
            self._end_commit()

    def _end_commit(self) -> None:
        replaced = (self.folder / name for name in _REPLACEABLE)
        for draft in (self.pack_path, self.pack_path.with_suffix(".manifest"), *replaced):
            draft.unlink(missing_ok=True)
        self.committing = False

    def remove(self) -> None:
        """Ends the writers and removes everything. Raises ``Conflict`` while a commit runs."""
        with self._lock:
            if self.committing:
                raise Conflict("the upload is being committed", field="upload_id")
            self._aborted = True
            writers = list(self._writers.values())
        for writer in writers:
            writer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _writer_closed(self, path: str) -> None:
        with self._lock:
            self._writers.pop(path, None)

    def _completed(self, path: str) -> None:
        with self._lock:
            if not self._aborted:
                self._digests.pop(path, None)
                complete = (*self.record.complete, path)
                self._save(msgspec.structs.replace(self.record, complete=complete))

    def _save(self, record: UploadRecord) -> None:
        write_durably(self.folder / "state.json", msgspec.json.encode(record))
        self.record = record


def _size_and_mtime(path: Path) -> tuple[int, float]:
    try:
        status = path.stat()
    except FileNotFoundError:  # not begun, or removed by an abort
        return 0, 0.0
    return status.st_size, status.st_mtime
