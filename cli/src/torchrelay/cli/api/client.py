"""Client of the gateway's REST API."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from difflib import get_close_matches
from ipaddress import ip_address
from typing import Any

import httpx

from torchrelay.cli.api.restarts import RESTART_TIMEOUT_S, restart_attempts
from torchrelay.cli.errors import ApiError, CliError, Unreachable, api_error

RETRY_S = 0.1
TIMEOUT_S = 600.0
# By the field of an error: the list that has the names that exist, and their field in it.
_LISTS = {
    "model": ("/v1/models", "id"),
    "base": ("/v1/models", "id"),
    "tenant": ("/v1/tenants", "name"),
    "key_id": ("/v1/keys", "id"),
    "upload_id": ("/v1/uploads", "id"),
    "batch_id": ("/v1/batches", "id"),
}
_MIN_LIKENESS = 0.7
_QUOTED = re.compile(r"'([^']+)'")


class GatewayClient:
    """Calls one gateway with one key; errors of the platform become ``ApiError`` with the platform's message.

    ``is_supervised``: whether something restarts the gateway. A refused connection is then retried for a while.
    ``tenant``: of the key, for messages, where it is known.
    """

    def __init__(
        self,
        url: str,
        key: str,
        is_supervised: Callable[[], bool] = lambda: False,
        restart_timeout_s: float = RESTART_TIMEOUT_S,
        tenant: str = "",
    ) -> None:
        self._key, self._tenant = clean_key(key), tenant
        headers = {"Authorization": f"Bearer {self._key}"}
        self.url, self._is_supervised, self._restart_timeout_s = url, is_supervised, restart_timeout_s
        try:
            timeout = httpx.Timeout(TIMEOUT_S, connect=5.0)
            self._http = httpx.Client(
                base_url=url,
                headers=headers,
                timeout=timeout,
                **connection_options(url),
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise CliError(f"{url!r} is malformed", "check --url") from error

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Sends one request and returns the decoded JSON, empty without one. Raises ``ApiError`` or ``Unreachable``."""
        content = self.content(method, path, **options)
        body: dict[str, Any] = json.loads(content) if content else {}
        return body

    def content(self, method: str, path: str, **options: Any) -> bytes:
        """Sends one request and returns the body of the response. Raises ``ApiError`` or ``Unreachable``."""
        with self._translated_errors():
            response = self._retry_connect(lambda: self._http.request(method, path, **options))
        if response.is_error:
            raise self._error(response.content, response.status_code)
        return response.content

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[Iterator[bytes]]:
        """Yields the response line by line as it arrives. Raises ``ApiError`` or ``Unreachable``."""
        with self._translated_errors():
            request = self._http.build_request(method, path, **options)
            with closing(self._retry_connect(lambda: self._http.send(request, stream=True))) as response:
                if response.is_error:
                    raise self._error(response.read(), response.status_code)
                yield _lines(response)

    def _error(self, content: bytes, status: int) -> ApiError:
        error = api_error(content, status)
        if status == 401 and self._key == os.environ.get("TORCHRELAY_API_KEY"):
            message = "the key in TORCHRELAY_API_KEY is invalid or revoked"
            hint = "unset it to use this home's key, or create one: torchrelay key create --tenant NAME"
            return ApiError(message, hint, status=status, code=error.code)
        if near := self._near(error):
            hint = f"did you mean {near}?"
            return ApiError(error.message, hint, status=status, code=error.code, field=error.field)
        if error.code == "model_not_found" and self._tenant:
            hint = f"this key is of tenant {self._tenant}; see: torchrelay models, torchrelay key use"
            return ApiError(error.message, hint, status=status, code=error.code)
        return error

    def _near(self, error: ApiError) -> str | None:
        """The existing name that is most like the one which an error says does not exist."""
        path, field = _LISTS.get(error.field, ("", ""))
        unknown = _QUOTED.search(error.message)
        if error.status != 404 or not path or unknown is None:
            return None
        try:
            names = [str(entry[field]) for entry in self._http.get(path).json()["data"]]
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None
        return near_name(unknown[1], names)

    def _retry_connect(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        """Retries while the connection is refused: nothing was sent, and a supervised gateway may be starting."""
        for attempt in restart_attempts(httpx.ConnectError, self._is_supervised, RETRY_S, self._restart_timeout_s):
            with attempt:
                return ask()
        raise AssertionError("a retry ends with a result or an error")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.UnsupportedProtocol as error:
            raise CliError(f"{self.url!r} is not a valid address", "write it as http://host:port") from error
        except httpx.ConnectError as error:
            if self._is_supervised():
                raise Unreachable(f"the gateway at {self.url} is restarting", "try again in a moment") from error
            if "WRONG_VERSION_NUMBER" in str(error):  # OpenSSL's word for an answer that is not TLS
                hint = f"write {self.url.replace('https', 'http', 1)}"
                raise CliError(f"{self.url} does not speak TLS", hint) from error
            raise Unreachable(f"{self.url} does not answer: {error}", "is the platform up? torchrelay up") from error
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"the connection to {self.url} broke: {what}", "try again") from error
        except UnicodeEncodeError as error:  # surrogates: bytes of the command line or terminal that are not UTF-8
            raise CliError("the input is not valid UTF-8", "check the arguments and the terminal's encoding") from error


def connection_options(url: str) -> dict[str, Any]:
    """Options of an httpx client for a gateway at ``url``."""
    return {
        # Plain HTTP needs no CA certificates; to read them takes 35 ms of CPU.
        "verify": False if url.startswith("http:") else httpx.create_ssl_context(),  # heeds SSL_CERT_FILE
        "trust_env": not _is_loopback(httpx.URL(url).host),  # a proxy would get the key, and not find this host
    }


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``, which may lack its tenant; None if none is."""
    tenant, _, own = name.rpartition("/")
    by_own: dict[str, str] = {}
    for each in known:
        of, _, last = each.rpartition("/")
        if not tenant or get_close_matches(tenant, [of], 1, _MIN_LIKENESS):
            by_own[last] = each
    return next((by_own[each] for each in get_close_matches(own, by_own, 1, _MIN_LIKENESS)), None)


def clean_key(key: str) -> str:
    """The key without white space around it, as files and clipboards add it. Raises ``CliError``, without the key."""
    key = key.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise CliError("the key has characters that no key has", "check --key and TORCHRELAY_API_KEY")
    return key


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def given(**fields: Any) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Splits at line feeds only: httpx also splits at U+2028 and the like, which JSON strings may contain."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest
