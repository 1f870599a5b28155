"""An object store as the remote store: S3 and compatible servers, Google Cloud Storage, Azure Blob Storage.

obstore reads credentials and regions from the environment (AWS_*, GOOGLE_*, AZURE_*) and the machine's role. It retries
whole requests; ``ObjectReader`` retries reads of ranges, because it can resume them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from torchrelay.common.errors import InvalidRequest
from torchrelay.param_store.remote.object_errors import OBJECT_ERRORS, platform_error
from torchrelay.param_store.remote.object_reader import ObjectReader
from torchrelay.param_store.remote.remote_store import RangeReader, RemoteOptions, RemoteStore, StoredObject

if TYPE_CHECKING:
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client

_PART_BYTES = 8 << 20
_MAX_PARTS = 9000  # S3 and Google take 10,000
_NUM_PARTS_AT_ONCE = 4  # 32 MiB of a pack in memory while it is uploaded, more of one above 70 GiB
_PART_TIMEOUT_S = 120.0
_ENDPOINT = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}


def part_bytes(num_bytes: int) -> int:
    """The size of the parts in which an object of ``num_bytes`` is sent: whole MiB."""
    return max(_PART_BYTES, -(-num_bytes // (_MAX_PARTS << 20)) << 20)


class ObjectStore(RemoteStore):
    """Keys are object names below the URL's prefix. Puts overwrite, so that a new upload repairs damaged objects."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self._scheme = urlsplit(url).scheme
        self._give_up_s = options.give_up_s
        reading: ClientConfig = {"read_timeout": timedelta(seconds=options.timeout_s), "timeout": "1h"}
        # Nothing is read while a part is sent, so writes have a total timeout instead of a read timeout.
        writing: ClientConfig = {"timeout": timedelta(seconds=max(_PART_TIMEOUT_S, options.timeout_s))}
        backoff: BackoffConfig = {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=3),
            "base": 2,
        }
        give_up = timedelta(seconds=options.give_up_s)
        retries: RetryConfig = {"max_retries": 10, "retry_timeout": give_up, "backoff": backoff}
        self._ranges = _client(url, options, reading, {"max_retries": 0})
        self._reads = _client(url, options, reading, retries)
        self._writes = _client(url, options, writing, retries)

    @classmethod
    def from_url(cls, url: str, options: RemoteOptions) -> ObjectStore:
        """Opens ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``; the prefix is optional."""
        if not urlsplit(url).netloc:
            raise InvalidRequest(f"{url!r} names no bucket", field="remote_url")
        return cls(url, options)

    def put_file(self, key: str, path: Path) -> None:
        with self._translating(key):
            size = part_bytes(path.stat().st_size)
            obstore.put(self._writes, key, path, chunk_size=size, max_concurrency=_NUM_PARTS_AT_ONCE)

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._translating(key):
            obstore.put(self._writes, key, data, use_multipart=False)

    def get_bytes(self, key: str) -> bytes:
        with self._translating(key):
            return bytes(obstore.get(self._reads, key).bytes())

    def open_range(self, key: str) -> RangeReader:
        return ObjectReader(self._ranges, key, self._scheme, self._give_up_s)

    def size(self, key: str) -> int:
        with self._translating(key):
            return obstore.head(self._reads, key)["size"]

    def delete(self, key: str) -> None:
        with self._translating(key):
            try:
                obstore.delete(self._reads, key)
            except FileNotFoundError as error:  # reported by other servers than S3
                if "NoSuchBucket" in str(error):
                    raise

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        with self._translating(prefix):
            for page in obstore.list(self._reads, prefix):
                for meta in page:
                    modified_unix_us = int(meta["last_modified"].timestamp() * 1e6)
                    yield StoredObject(meta["path"], meta["size"], modified_unix_us)

    @contextmanager
    def _translating(self, key: str) -> Iterator[None]:
        try:
            yield
        except OBJECT_ERRORS as error:
            raise platform_error(error, key, self._scheme) from error


def _client(url: str, options: RemoteOptions, limits: ClientConfig, retries: RetryConfig) -> Client:
    config: Any = {}  # obstore has a type per provider
    if options.endpoint:
        config[_ENDPOINT[urlsplit(url).scheme]] = options.endpoint
        if urlsplit(options.endpoint).scheme == "http":  # an explicit http URL counts as consent
            limits = {**limits, "allow_http": True}
    try:
        client: Client = from_url(url, config=config, client_options=limits, retry_config=retries)
        return client
    except (BaseError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequest(f"remote_url {url!r} is not usable: {reason}", field="remote_url") from error
