"""The tenants' REST door, as the CLI and the demo use it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from torchrelay.cli.problems import Problem

UPLOADED_SUFFIXES = (".json", ".safetensors", ".txt", ".jinja")
READ_BYTES = 1 << 20
Progress = Callable[[str, int, int], None]  # stage or file, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class LocalFile:
    """One file of a model folder, as it is declared."""

    path: str
    size: int
    sha256: str


def folder_files(folder: Path, progress: Progress) -> list[LocalFile]:
    """The files of a Hugging Face folder that make up a model, with their digests. Raises ``Problem``."""
    if not (folder / "config.json").is_file():
        raise Problem(f"{folder} has no config.json", "name the folder of a Hugging Face model")
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in UPLOADED_SUFFIXES)
    total, done = sum(path.stat().st_size for path in paths), 0
    files = []
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
                done += len(block)
                progress("hash", done, total)
        files.append(LocalFile(path.name, path.stat().st_size, digest.hexdigest()))
    return files


class Client:
    """Calls one gateway with one key; errors of the platform become ``Problem`` with the platform's own sentence."""

    def __init__(self, url: str, key: str, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=5.0))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One request; the decoded JSON answer. Raises ``Problem``."""
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise Problem(
                f"{self._http.base_url} does not answer: {error}", "is the platform up? torchrelay up"
            ) from error
        if response.is_error:
            raise _problem(response.content, response.status_code)
        return response.json() if response.content else None

    def upload(self, folder: Path, model: str, settings: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Uploads a model folder and publishes it; goes on where an interrupted file stopped. Returns the model."""
        files = folder_files(folder, progress)
        declared = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in files]
        upload = self.call("POST", "/v1/uploads", json={"model": model, "files": declared})
        received = {str(state["path"]): int(state["received"]) for state in upload["files"]}
        total, done = sum(file.size for file in files), sum(received.values())
        for file in files:
            offset = received.get(file.path, 0)
            if offset < file.size:
                done = self._put(str(upload["id"]), folder, file, offset, done, total, progress)
        return self._commit(str(upload["id"]), settings, progress)

    def _put(
        self, upload_id: str, folder: Path, file: LocalFile, offset: int, done: int, total: int, progress: Progress
    ) -> int:
        def body() -> Iterator[bytes]:
            nonlocal done
            with (folder / file.path).open("rb") as source:
                source.seek(offset)
                while block := source.read(READ_BYTES):
                    yield block
                    done += len(block)
                    progress("upload", done, total)

        headers = {"Upload-Offset": str(offset), "Content-Length": str(file.size - offset)}
        self.call("PUT", f"/v1/uploads/{upload_id}/files/{file.path}", content=body(), headers=headers)
        return done

    def _commit(self, upload_id: str, settings: dict[str, Any], progress: Progress) -> dict[str, Any]:
        headers = {"Accept": "application/x-ndjson"}
        with self._http.stream("POST", f"/v1/uploads/{upload_id}/commit", json=settings, headers=headers) as response:
            if response.is_error:
                raise _problem(response.read(), response.status_code)
            for line in response.iter_lines():
                event = json.loads(line)
                if "error" in event:
                    raise _problem(line.encode(), 422)
                if "model" in event:
                    model: dict[str, Any] = event["model"]
                    return model
                progress(str(event["stage"]), int(event["done"]), int(event["total"]))
        raise Problem("the gateway ended the commit without an answer", "commit again: nothing was published half")


def _problem(content: bytes, status: int) -> Problem:
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return Problem(f"the gateway answered {status}: {content[:200]!r}")
    param = f" ({error['param']})" if error.get("param") else ""
    mend = {401: "give a key with --key or TORCHRELAY_API_KEY", 429: "try again later"}.get(status, "")
    return Problem(f"{error.get('message', 'no message')}{param}", mend)
