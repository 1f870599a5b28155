"""Uploads of model folders: declare, send what is missing, commit. Broken connections are gone on from."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_folder import LocalFile, model_files
from torchrelay.cli.errors import ApiError, Unreachable, api_error

READ_BYTES = 1 << 20
MAX_FAILED_TRIES = 5
Progress = Callable[[str, int, int], None]  # stage, done, total


class UploadJournal:
    """Remembers on disk which upload is under way, so that the program run again goes on with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> UploadJournal:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(cache / "torchrelay" / "uploads")

    def recall(self, what: str) -> str | None:
        """The id of the upload of exactly this, if one was begun and not ended."""
        try:
            return self._file(what).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def note(self, what: str, upload_id: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(what).write_text(upload_id)

    def forget(self, what: str) -> None:
        self._file(what).unlink(missing_ok=True)

    def _file(self, what: str) -> Path:
        return self._folder / hashlib.sha256(what.encode()).hexdigest()


@dataclass(slots=True)
class _SentBytes:
    """Bytes the gateway has, of all files."""

    done: int
    total: int


class ModelUpload:
    """One upload of one folder."""

    def __init__(
        self, client: GatewayClient, folder: Path, model: str, progress: Progress, memory: UploadJournal | None = None
    ) -> None:
        self._client, self._folder, self._model = client, folder, model
        self._progress, self._memory = progress, memory

    def run(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Hashes, sends and commits; the published model. Raises ``Problem``."""
        files = model_files(self._folder, self._progress)
        what = json.dumps([self._client.url, self._model, [asdict(file) for file in files]])
        upload = self._begin(what, files)
        states = {str(state["path"]): state for state in upload["files"]}
        sent = _SentBytes(sum(int(state["received"]) for state in states.values()), sum(file.size for file in files))
        self._progress("upload", sent.done, sent.total)
        for file in files:
            self._send(str(upload["id"]), file, states[file.path], sent)
        model = self._commit(str(upload["id"]), settings)
        if self._memory is not None:
            self._memory.forget(what)
        return model

    def _begin(self, what: str, files: list[LocalFile]) -> dict[str, Any]:
        upload: dict[str, Any]
        if self._memory is not None and (known := self._memory.recall(what)):
            try:
                upload = self._client.call("GET", f"/v1/uploads/{known}")
                return upload
            except ApiError as refused:
                if refused.status != 404:
                    raise
                self._memory.forget(what)
        declared = [asdict(file) for file in files]
        upload = self._client.call("POST", "/v1/uploads", json={"model": self._model, "files": declared})
        if self._memory is not None:
            self._memory.note(what, str(upload["id"]))
        return upload

    def _send(self, upload_id: str, file: LocalFile, state: dict[str, Any], sent: _SentBytes) -> None:
        """Sends until the gateway has the whole file; after a break it asks how much arrived."""
        num_failures, before = 0, sent.done - int(state["received"])
        while not state["complete"]:
            offset = int(state["received"])
            sent.done = before + offset
            try:
                state = self._put(upload_id, file, offset, sent)
            except (Unreachable, ApiError) as problem:
                if num_failures == MAX_FAILED_TRIES or (isinstance(problem, ApiError) and problem.status != 409):
                    raise
                num_failures += 1
                time.sleep(0.2 * num_failures)  # the gateway may be starting again
                state = self._state(upload_id, file, state)
                if int(state["received"]) > offset:
                    num_failures = 0

    def _state(self, upload_id: str, file: LocalFile, known: dict[str, Any]) -> dict[str, Any]:
        try:
            upload = self._client.call("GET", f"/v1/uploads/{upload_id}")
        except Unreachable:
            return known
        return next((state for state in upload["files"] if state["path"] == file.path), known)

    def _put(self, upload_id: str, file: LocalFile, offset: int, sent: _SentBytes) -> dict[str, Any]:
        def body() -> Iterator[bytes]:
            with (self._folder / file.path).open("rb") as source:
                source.seek(offset)
                left = file.size - offset
                while left and (block := source.read(min(READ_BYTES, left))):
                    yield block
                    left -= len(block)
                    sent.done += len(block)
                    self._progress("upload", sent.done, sent.total)

        headers = {"Upload-Offset": str(offset), "Content-Length": str(file.size - offset)}
        path = f"/v1/uploads/{upload_id}/files/{file.path}"
        state: dict[str, Any] = self._client.call("PUT", path, content=body(), headers=headers)
        return state

    def _commit(self, upload_id: str, settings: dict[str, Any]) -> dict[str, Any]:
        path, headers = f"/v1/uploads/{upload_id}/commit", {"Accept": "application/x-ndjson"}
        with self._client.stream("POST", path, json=settings, headers=headers) as lines:
            for line in lines:
                event = json.loads(line)
                if "error" in event:
                    raise api_error(line, 422)
                if "model" in event:
                    model: dict[str, Any] = event["model"]
                    return model
                self._progress(str(event["stage"]), int(event["done"]), int(event["total"]))
        raise Unreachable("the gateway ended the commit without an answer", "commit again: nothing was half published")
