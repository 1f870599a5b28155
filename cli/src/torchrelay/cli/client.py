"""The tenants' REST door, as the CLI and the demo use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from torchrelay.cli.problems import Problem, Unreachable, refused
from torchrelay.cli.uploading import ModelUpload, Progress, UploadMemory


class Client:
    """Calls one gateway with one key; errors of the platform become ``Refused`` with the platform's own sentence."""

    def __init__(self, url: str, key: str, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self.url = url
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=5.0))
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise Problem(f"{url!r} or its key is not well formed", "check --url and --key") from error

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One request; the decoded JSON answer. Raises ``Refused`` or ``Unreachable``."""
        with self._reaching():
            response = self._http.request(method, path, **options)
        if response.is_error:
            raise refused(response.content, response.status_code)
        return response.json() if response.content else None

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[Iterator[bytes]]:
        """One request whose answer is read line by line as it comes. Raises ``Refused`` or ``Unreachable``."""
        with self._reaching(), self._http.stream(method, path, **options) as response:
            if response.is_error:
                raise refused(response.read(), response.status_code)
            yield _lines(response)

    def upload(
        self,
        folder: Path,
        model: str,
        settings: dict[str, Any],
        progress: Progress,
        memory: UploadMemory | None = None,
    ) -> dict[str, Any]:
        """Uploads a model folder and publishes it; goes on where an interrupted file stopped. Returns the model.

        With ``memory``, also where an earlier run of the program stopped.
        """
        return ModelUpload(self, folder, model, progress, memory).run(settings)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.UnsupportedProtocol as error:
            raise Problem(f"{self.url!r} is not an address", "write it as http://host:port") from error
        except httpx.ConnectError as error:
            raise Unreachable(f"{self.url} does not answer: {error}", "is the platform up? torchrelay up") from error
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"the connection to {self.url} broke: {what}", "try again") from error


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Lines end with a line feed alone: JSON may hold U+2028 and the like, at which httpx's own splitting breaks."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest
