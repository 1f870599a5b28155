"""The remote store, which keeps published packs and files permanently: the interface, and a registry of backends.

    packs/<pack id>             the pack's bytes
    packs/<pack id>.manifest    its manifest, whose BLAKE3 is the pack id
    files/<digest>              small files of versions, by BLAKE3
    versions/<version id>.json  the packs and files of a version; its BLAKE3 is the version id
    compiled/<pack id>.<digest> code that workers have compiled for a pack, with their MAC
    objects/<tenant id>/<name>  files of tenants, such as the input of a batch

Every other key is the digest of its content, so writes are idempotent. Methods block: call them on threads. They raise
``Unavailable`` when an object store is unreachable, slow or broken for longer than its options allow, and ``OSError``
for faults of a folder.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from torchrelay.common.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options of object stores."""

    endpoint: str = ""  # base URL of your own server; empty: the provider's, or its environment variables decide
    timeout_s: float = 10.0  # of silence, after which a request is retried
    give_up_s: float = 30.0  # without progress, after which retries end


@dataclass(frozen=True, slots=True)
class StoredObject:
    key: str
    num_bytes: int
    modified_unix_us: int  # when it was last put


class RangeReader(ABC):
    """An object whose ranges several threads may read at once."""

    @property
    def is_cached(self) -> bool:
        """Whether reads currently come from this host's disk cache."""
        return False

    @abstractmethod
    def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        """Fills the whole view.

        Raises ``DataCorrupted`` if the object is too short, ``NotFound``, ``Unavailable`` (also once ``stop`` is set),
        ``OSError``.
        """

    def read_again(self, offset: int, view: memoryview, stop: threading.Event) -> bool:
        """Reads a damaged chunk again. False: the bytes would be the same. Raises like ``read_into``."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Releases the object. Call it while no read is running."""


class RemoteStore(ABC):
    """Objects by key; a missing key raises ``NotFound``."""

    @abstractmethod
    def put_file(self, key: str, path: Path) -> None:
        """Stores a copy of a file, which is durable when this returns and not visible before."""

    @abstractmethod
    def put_bytes(self, key: str, data: bytes) -> None:
        """Stores bytes in the same way."""

    @abstractmethod
    def get_bytes(self, key: str) -> bytes:
        """The content of a small object."""

    @abstractmethod
    def open_range(self, key: str) -> RangeReader:
        """A reader of the object; an object store notices at the first read that it is missing."""

    @abstractmethod
    def size(self, key: str) -> int: ...

    @abstractmethod
    def delete(self, key: str) -> None:
        """Deletes the object; no effect if it is missing."""

    @abstractmethod
    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose keys begin with ``prefix``, which ends with a slash."""


# Backends, imported on first use: scheme -> (module, class).
_OBJECTS = ("torchrelay.param_store.remote.object_store", "ObjectStore")
_STORES = {
    "file": ("torchrelay.param_store.remote.folder_store", "FolderStore"),
    "s3": _OBJECTS,
    "gs": _OBJECTS,
    "az": _OBJECTS,
}


def open_remote(url: str, options: RemoteOptions | None = None) -> RemoteStore:
    """The store that ``url`` names, not yet contacted. Raises ``InvalidRequest`` for any other URL."""
    scheme = urlsplit(url).scheme
    if scheme not in _STORES:
        known = ", ".join(f"{name}:" for name in _STORES)
        raise InvalidRequest(
            f"{url!r} is not a supported remote_url; supported schemes are {known}", field="remote_url"
        )
    module, name = _STORES[scheme]
    store: RemoteStore = getattr(import_module(module), name).from_url(url, options or RemoteOptions())
    return store


def is_folder(url: str) -> bool:
    """Whether ``url`` names a folder of this machine."""
    return urlsplit(url).scheme == "file"
