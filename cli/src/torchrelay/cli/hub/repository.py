"""A model repository of the Hugging Face hub, or of the mirror that HF_ENDPOINT names, at one commit.

The hub's API lists the files with their digests, and `/OWNER/NAME/resolve/COMMIT/FILE` has their bytes, in ranges. A
large file is listed with its SHA-256, which is declared to the platform and compared there with what arrives, bytes of
earlier runs included. A small file is listed with Git's SHA-1, which is compared here. The token goes to the hub alone,
or to that mirror.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx2
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public names that it exports lazily
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from torchrelay.cli.api.model_source import ModelSource, ProgressCallback
from torchrelay.cli.api.upload import user_cache
from torchrelay.cli.errors import CliError
from torchrelay.cli.hub.name import HubName
from torchrelay.common.quantities import format_bytes

MAX_FAILED_TRIES = 5
_MAX_RANGE_BYTES = 16 << 30  # content delivery networks serve no more than a few tens of gigabytes at once
_MAX_DOCUMENT_BYTES = 64 << 20  # kept in memory; the hub stores no file above 10 MB in Git
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf", re.IGNORECASE)
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


class HubRepository(ModelSource):
    """The files of a repository. Raises ``CliError`` if the hub does not list them."""

    def __init__(self, name: HubName) -> None:
        self._name, self._repo, self._documents = name, name.repo, dict[str, bytes]()
        timeout_s = constants.DEFAULT_REQUEST_TIMEOUT
        try:
            with _translated_errors(name):
                info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=timeout_s)
        except (ValueError, TypeError, LookupError) as error:
            raise CliError(
                f"{constants.ENDPOINT} does not answer as a hub does: {error}", "check HF_ENDPOINT"
            ) from error
        files = info.siblings or []
        if info.sha is None or any(file.size is None for file in files):
            raise CliError(f"{constants.ENDPOINT} lists no commit, or no sizes of files", "check HF_ENDPOINT")
        self.commit = info.sha
        self._sizes = {file.rfilename: file.size or 0 for file in files}
        self._git = {file.rfilename: file.blob_id for file in files}  # SHA-1, for a large file that of its pointer
        self._sha256 = {file.rfilename: file.lfs.sha256 for file in files if file.lfs}

    def __str__(self) -> str:
        return self._repo

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def sha256(self, path: str) -> str:
        return self._sha256.get(path) or hashlib.sha256(self._document(path)).hexdigest()

    def blocks(self, path: str, offset: int = 0) -> Iterator[bytes]:
        if path in self._sha256:
            return self._received(path, offset)
        return iter([self._document(path)[offset:]])

    @contextmanager
    def local_file(
        self, path: str, progress: ProgressCallback, check: Callable[[Path], object], num_checked_bytes: int
    ) -> Iterator[Path]:
        """A copy in the user's cache, where the next run continues an interrupted download; removed if the block ends
        without an error, or the file is refused. Locked, so that a second run does not write into it.
        """
        folder = user_cache() / "hub"
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / f"{self.commit}-{path}".replace("/", "-")
        with copy.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CliError(f"another upload uses {copy}", "run the same command again after it") from error
            try:
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256")
                self._check_space(path, folder, self._sizes[path] - file.tell())
                is_checked = False
                for block in self.blocks(path, file.tell()):
                    if not is_checked and file.tell() >= num_checked_bytes:
                        file.flush()
                        check(copy)
                        is_checked = True
                    file.write(block)
                    digest.update(block)
                    progress(path, file.tell(), self._sizes[path])
                file.flush()
                if digest.hexdigest() != self.sha256(path):
                    raise self._damaged(path, "SHA-256", digest.hexdigest(), self.sha256(path))
                yield copy
            except CliError as error:
                if error.refuses_file:
                    copy.unlink()
                raise
            copy.unlink()

    def _check_space(self, path: str, folder: Path, num_bytes: int) -> None:
        free = shutil.disk_usage(folder).free
        if free < num_bytes:
            fault = f"{folder} has {format_bytes(free)} free, and the file needs {format_bytes(num_bytes)}"
            hint = "free some, or set XDG_CACHE_HOME to a folder with more space"
            raise CliError(f"{self._repo}/{path}: {fault}", hint)

    def advice(self) -> str:
        files = self._gguf_files()
        if not files:
            return "give a repository with config.json, tokenizer.json and safetensors, or with GGUF files"
        return f"name the quantization of a GGUF file, as {self._repo}:Q4_K_M; there are {', '.join(files)}"

    def gguf_file(self, quantization: str) -> str:
        """The one GGUF file with ``quantization`` as a word of its path. Raises ``CliError`` with the choices."""
        word = re.compile(rf"(?<![a-z0-9]){re.escape(quantization)}(?![a-z0-9_])", re.IGNORECASE)
        files = self._gguf_files()
        matching = [path for path in files if word.search(path)]
        if len(matching) == 1:
            return matching[0]
        if matching and all(_SPLIT.search(path) for path in matching):
            hint = "download them, merge them with llama-gguf-split, and upload the merged file"
            raise CliError(f"{self._repo} has {quantization} in {len(matching)} parts", hint)
        fault = f"{len(matching) or 'no'} GGUF files with {quantization} in their names"
        hint = f"name one: {', '.join(matching or files)}" if files else f"leave :{quantization} out"
        raise CliError(f"{self._repo} has {fault}", hint)

    def _gguf_files(self) -> list[str]:
        """The files of language models; a projector of images is none."""
        return sorted(path for path in self._sizes if path.lower().endswith(".gguf") and "mmproj" not in path.lower())

    def _document(self, path: str) -> bytes:
        """The content of a file that the hub stores in Git."""
        if path not in self._documents:
            if self._sizes[path] > _MAX_DOCUMENT_BYTES:
                raise CliError(f"{self._repo}/{path} has {self._sizes[path]:,} bytes, and no SHA-256 is listed for it")
            content = b"".join(self._received(path, 0))
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            if digest != self._git[path]:
                raise self._damaged(path, "SHA-1 in Git", digest, self._git[path])
            self._documents[path] = content
        return self._documents[path]

    def _damaged(self, path: str, kind: str, own: str, listed: str | None) -> CliError:
        fault = f"its {kind} is {own}, and {constants.ENDPOINT} lists {listed}"
        return CliError(f"{self._repo}/{path}: {fault}", "run the same command again", refuses_file=True)

    def _received(self, path: str, offset: int) -> Iterator[bytes]:
        """Continues at the byte where a connection broke."""
        num_failures = 0
        with _translated_errors(self._name):
            while offset < self._sizes[path]:
                try:
                    for block in self._range(path, offset):
                        yield block
                        offset, num_failures = offset + len(block), 0
                except httpx2.TransportError:
                    if num_failures == MAX_FAILED_TRIES:
                        raise
                    num_failures += 1
                    time.sleep(0.2 * num_failures)

    def _range(self, path: str, offset: int) -> Iterator[bytes]:
        end = min(offset + _MAX_RANGE_BYTES, self._sizes[path])
        url = f"{constants.ENDPOINT}/{self._repo}/resolve/{self.commit}/{quote(path)}"
        headers = build_hf_headers(library_name="torchrelay")
        headers |= {"Range": f"bytes={offset}-{end - 1}", "Accept-Encoding": "identity"}
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with http_stream_backoff("GET", url, headers=headers, timeout=timeout_s, retry_on_exceptions=()) as response:
            hf_raise_for_status(response)
            position = 0 if response.status_code == 200 else offset  # some proxies ignore ranges
            for block in response.iter_bytes():
                if wanted := block[max(offset - position, 0) : max(end - position, 0)]:
                    yield wanted
                position += len(block)
                if position > end:  # at `end` the body's end is awaited, so that the connection can be used again
                    return
            if position < end:
                raise httpx2.RemoteProtocolError(f"{path} ended after {position:,} bytes")


@contextmanager
def _translated_errors(name: HubName) -> Iterator[None]:
    """Raises ``CliError`` for the hub's errors."""
    hub, repo = constants.ENDPOINT, name.repo
    try:
        yield
    except HFValidationError as error:
        raise CliError(f"{repo} is not a name on the hub", str(error)) from error
    except OfflineModeIsEnabled as error:
        raise CliError("HF_HUB_OFFLINE forbids to read the hub", "unset it, or give a folder") from error
    except GatedRepoError as error:
        raise CliError(f"{repo} is gated", f"accept its terms at {hub}/{repo}, and {_LOG_IN}") from error
    except RevisionNotFoundError as error:
        raise CliError(f"{repo} has no revision {name.revision}", f"see {hub}/{repo}") from error
    except HfHubHTTPError as error:
        status, is_anonymous = error.response.status_code, "authorization" not in error.response.request.headers
        if isinstance(error, RepositoryNotFoundError) or (status == 401 and is_anonymous):
            hint = f"check the name; if the model is private, {_LOG_IN}"
            raise CliError(f"{repo} is neither a path here nor a model of {hub}", hint) from error
        if status == 401:
            raise CliError(f"{hub} refuses the token", _LOG_IN) from error
        fault = error.server_message or error.response.reason_phrase
        raise CliError(f"{hub} answered {status}: {fault}", "run the same command again later to resume") from error
    except httpx2.RequestError as error:
        hint = "check the network, and HF_ENDPOINT if a mirror is used; run the same command again to resume"
        raise CliError(f"{hub} does not answer: {error or type(error).__name__}", hint) from error
