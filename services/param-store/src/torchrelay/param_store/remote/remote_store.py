"""The remote store, which keeps published packs and files for good: the interface, and a registry of backends.

    packs/<pack id>             the pack's bytes
    packs/<pack id>.manifest    its manifest, whose BLAKE3 is the pack id
    files/<digest>              small files of versions, by BLAKE3
    versions/<version id>.json  the packs and files of a version; its BLAKE3 is the version id

Every key is the digest of its content, so writes are idempotent. Methods block: call them on threads. They raise
``Unavailable`` when an object store is away, slow or broken for longer than its options allow, and ``OSError`` for a
folder's faults.
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

    endpoint: str = ""  # base URL of your own server; empty: the provider's, or from its environment variables
    timeout_s: float = 10.0  # of silence, after which a request is retried
    give_up_s: float = 30.0  # without progress, after which retries end


@dataclass(frozen=True, slots=True)
class StoredObject:
    key: str
    num_bytes: int
    modified_unix_us: int  # when it was last put


class RangeReader(ABC):
    """One object, whose ranges several threads may read at once."""

    @abstractmethod
    def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        """Fills the whole view.

        Raises ``DataCorrupted`` if the object is too short, ``NotFound``, ``Unavailable`` (also once ``stop`` is set),
        ``OSError``.
        """

    def read_again(self, offset: int, view: memoryview, stop: threading.Event) -> bool:
        """Reads again what did not match its digest; False if it would be the same. Raises as ``read_into``."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Called when no read is running."""


class RemoteStore(ABC):
    """Objects by key; a missing key raises ``NotFound``."""

    @abstractmethod
    def put_file(self, key: str, path: Path) -> None:
        """Stores a copy of a file, durable when this returns and not visible before."""

    @abstractmethod
    def put_bytes(self, key: str, data: bytes) -> None:
        """The same for bytes in memory."""

    @abstractmethod
    def get_bytes(self, key: str) -> bytes:
        """All of a small object."""

    @abstractmethod
    def open_range(self, key: str) -> RangeReader:
        """A reader of the object; an object store finds out that it is missing on the first read."""

    @abstractmethod
    def size(self, key: str) -> int: ...

    @abstractmethod
    def delete(self, key: str) -> None:
        """Without effect if it is missing."""

    @abstractmethod
    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose keys begin with ``prefix``, which ends with a slash."""

    def list(self, prefix: str) -> Iterator[str]:
        """Their keys."""
        return (found.key for found in self.objects(prefix))


# Backends, imported on first use: scheme -> (module, class).
_OBJECTS = ("torchrelay.param_store.remote.object_store", "ObjectStore")
_STORES = {
    "file": ("torchrelay.param_store.remote.folder_store", "FolderStore"),
    "s3": _OBJECTS,
    "gs": _OBJECTS,
    "az": _OBJECTS,
}


def open_remote(url: str, options: RemoteOptions | None = None) -> RemoteStore:
    """The store that ``url`` names, not contacted yet. Raises ``InvalidRequest`` for a URL that names none."""
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
