"""Uploads of models: declare, send what is missing, commit; resumes after a broken connection."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchrelay.cli.api.client import GatewayClient, given
from torchrelay.cli.api.model_files import ModelFile, model_files
from torchrelay.cli.api.model_source import ModelSource, ProgressCallback
from torchrelay.cli.api.parallel import in_parallel
from torchrelay.cli.errors import ApiError, CliError, Unreachable, api_error

MAX_FAILED_TRIES = 5
ENDING_CODES = ("upload_refused", "quota_exceeded")  # errors of a commit after which the upload has ended


def user_cache() -> Path:
    """The folder of this program in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrelay"


class UploadJournal:
    """Records unfinished uploads on disk, so that the next run of the program resumes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> UploadJournal:
        return cls(user_cache() / "uploads")

    def find(self, fingerprint: str) -> str | None:
        """The id of an unfinished upload of exactly these files."""
        try:
            return self._file(fingerprint).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def record(self, fingerprint: str, upload_id: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(fingerprint).write_text(upload_id)

    def forget(self, fingerprint: str) -> None:
        self._file(fingerprint).unlink(missing_ok=True)

    def _file(self, fingerprint: str) -> Path:
        return self._folder / hashlib.sha256(fingerprint.encode()).hexdigest()


class ModelUpload:
    """The upload of a model; with a ``journal`` it resumes where an earlier run stopped."""

    def __init__(
        self,
        client: GatewayClient,
        source: ModelSource,
        model: str,
        progress: ProgressCallback,
        journal: UploadJournal | None = None,
    ) -> None:
        self._client, self._source, self._model = client, source, model
        self._journal, self._lock, self._tell = journal, threading.Lock(), progress

    def run(self, settings: dict[str, Any], needed_engine: str = "") -> dict[str, Any]:
        """Hashes, sends and commits; returns the published model. Raises ``CliError``, also for Ctrl-C.

        The ``settings`` of an adapter name its ``base``. An engine that no worker has, of the settings or that the
        weights need (``needed_engine``), is refused before anything is sent. What is interrupted stays open at the
        gateway, to be resumed; what is refused has ended there.
        """
        files = model_files(self._source, self._progress, is_adapter="base" in settings)
        quantize = str(settings.get("quantize", ""))
        fingerprint = json.dumps([self._client.url, self._model, quantize, [asdict(file) for file in files]])
        chosen = settings.get("engine")
        engine = needed_engine if chosen in (None, "auto") else str(chosen)
        upload = self._begin(fingerprint, files, engine, quantize)
        upload_id, knew_all = str(upload["id"]), all(state["complete"] for state in upload["files"])
        try:
            self._send_all(upload, files)
            try:
                return self._commit(upload_id, settings, fingerprint)
            except ApiError as error:
                if not knew_all or error.status != 409:
                    raise
            # The platform knew the files of another model, which has been deleted since.
            self._send_all(self._client.call("GET", f"/v1/uploads/{upload_id}"), files)
            return self._commit(upload_id, settings, fingerprint)
        except KeyboardInterrupt:
            hint = f"run the same command again to resume, or free what was sent: torchrelay uploads abort {upload_id}"
            raise CliError("interrupted", hint) from None

    def _progress(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            self._tell(stage, done, total)

    def _send_all(self, upload: dict[str, Any], files: list[ModelFile]) -> None:
        """Sends what is missing, several files at once, each over a connection of its own."""
        states = {str(state["path"]): state for state in upload["files"]}

        def send(file: ModelFile, check: Callable[[], None]) -> None:
            self._send(str(upload["id"]), file, states[file.path], check)

        in_parallel(send, files)

    def _forget(self, fingerprint: str) -> None:
        if self._journal is not None:
            self._journal.forget(fingerprint)

    def _begin(self, fingerprint: str, files: list[ModelFile], engine: str, quantize: str) -> dict[str, Any]:
        if self._journal is not None and (known := self._journal.find(fingerprint)):
            try:
                return self._client.call("GET", f"/v1/uploads/{known}")
            except ApiError as error:
                if error.status != 404:
                    raise
                self._journal.forget(fingerprint)
        body = {"model": self._model, "files": [asdict(file) for file in files]}
        body |= given(engine=engine or None, quantize=quantize or None)
        upload = self._client.call("POST", "/v1/uploads", json=body)
        if self._journal is not None:
            self._journal.record(fingerprint, str(upload["id"]))
        return upload

    def _send(self, upload_id: str, file: ModelFile, state: dict[str, Any], check: Callable[[], None]) -> None:
        """Sends until the gateway has the whole file; after an interruption asks how much arrived."""
        self._progress(file.path, int(state["received"]), file.size)
        num_failures = 0
        while not state["complete"]:
            offset = int(state["received"])
            try:
                state = self._put(upload_id, file, offset, check)
            except (Unreachable, ApiError) as error:
                if num_failures == MAX_FAILED_TRIES or (isinstance(error, ApiError) and error.status != 409):
                    raise
                num_failures += 1
                time.sleep(0.2 * num_failures)  # the gateway may be restarting
                state = self._state(upload_id, file, state)
                if int(state["received"]) > offset:
                    num_failures = 0

    def _state(self, upload_id: str, file: ModelFile, known: dict[str, Any]) -> dict[str, Any]:
        try:
            upload = self._client.call("GET", f"/v1/uploads/{upload_id}")
        except Unreachable:
            return known
        return next((state for state in upload["files"] if state["path"] == file.path), known)

    def _put(self, upload_id: str, file: ModelFile, offset: int, check: Callable[[], None]) -> dict[str, Any]:
        def body() -> Iterator[bytes]:
            sent = offset
            for block in self._source.blocks(file.path, offset):
                check()
                if sent == file.size:  # the file has grown since
                    return
                yield block[: file.size - sent]
                sent = min(sent + len(block), file.size)
                self._progress(file.path, sent, file.size)

        headers = {"Upload-Offset": str(offset), "Content-Length": str(file.size - offset)}
        path = f"/v1/uploads/{upload_id}/files/{file.path}"
        return self._client.call("PUT", path, content=body(), headers=headers)

    def _commit(self, upload_id: str, settings: dict[str, Any], fingerprint: str) -> dict[str, Any]:
        path, headers = f"/v1/uploads/{upload_id}/commit", {"Accept": "application/x-ndjson"}
        with self._client.stream("POST", path, json=settings, headers=headers) as lines:
            for line in lines:
                event = json.loads(line)
                if "error" in event:
                    error = api_error(line, int(event.get("status", 422)))
                    if error.code in ENDING_CODES:
                        self._forget(fingerprint)
                    raise error
                if "model" in event:
                    self._forget(fingerprint)
                    model: dict[str, Any] = event["model"]
                    return model
                self._progress(str(event["stage"]), int(event["done"]), int(event["total"]))
        raise Unreachable("the gateway ended the commit early", "run the command again; nothing was published")
