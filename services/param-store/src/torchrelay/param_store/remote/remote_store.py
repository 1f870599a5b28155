"""The remote store: where published packs and files lie for good. An interface, and a registry of what is behind it.

    packs/<pack id>             the pack's bytes
    packs/<pack id>.manifest    its manifest, whose BLAKE3 is the pack id
    files/<digest>              small files of versions, by their BLAKE3
    versions/<version id>.json  what a version consists of; its BLAKE3 is the version id

Every key is made of its content's digest, so writing twice has the effect of once. Methods block: call them on threads.
``Unavailable`` is raised when the store is away, slow or broken for longer than its options allow; a folder's faults
are the system's, ``OSError``.
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
    """How a store behind a network is reached; a folder has no use for it."""

    endpoint: str = ""  # base URL of a server of one's own; empty: the provider's, or what its environment says
    timeout_s: float = 10.0  # of silence, after which a request is tried again
    give_up_s: float = 30.0  # without any progress, after which trying again ends


class RangeReader(ABC):
    """One object, opened to be read in ranges by several threads at once."""

    @abstractmethod
    def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        """Fills the whole view.

        Raises ``DataCorrupted`` when the object ends before, ``NotFound``, ``Unavailable`` (also once ``stop`` is set),
        ``OSError``.
        """

    def read_again(self, offset: int, view: memoryview, stop: threading.Event) -> bool:
        """For bytes that did not match their digest: reads them once more; False: they would be the same.

        Raises what ``read_into`` raises.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """No read is under way any more."""


class RemoteStore(ABC):
    """Objects by key. ``NotFound`` is raised for a key that is not there."""

    @abstractmethod
    def put_file(self, key: str, path: Path) -> None:
        """Stores a file's bytes: durable and whole when this returns, not visible before; ``path`` stays."""

    @abstractmethod
    def put_bytes(self, key: str, data: bytes) -> None:
        """The same for bytes in memory."""

    @abstractmethod
    def get_bytes(self, key: str) -> bytes:
        """A small object whole."""

    @abstractmethod
    def open_range(self, key: str) -> RangeReader:
        """Behind a network, a missing object is told by the first read."""

    @abstractmethod
    def size(self, key: str) -> int: ...

    @abstractmethod
    def delete(self, key: str) -> None:
        """Without effect when it is not there."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """The keys that begin with ``prefix``, which ends with a slash."""


# Imported when a URL asks for them: scheme -> (module, class).
_OBJECTS = ("torchrelay.param_store.remote.object_store", "ObjectStore")
_STORES = {
    "file": ("torchrelay.param_store.remote.folder_store", "FolderStore"),
    "s3": _OBJECTS,
    "gs": _OBJECTS,
    "az": _OBJECTS,
}


def open_remote(url: str, options: RemoteOptions | None = None) -> RemoteStore:
    """The store that ``url`` names; nothing is sent yet. Raises ``InvalidRequest`` for what names none."""
    scheme = urlsplit(url).scheme
    if scheme not in _STORES:
        known = ", ".join(f"{name}:" for name in _STORES)
        raise InvalidRequest(f"no remote store for {url!r}; known are {known}", field="remote_url")
    module, name = _STORES[scheme]
    store: RemoteStore = getattr(import_module(module), name).from_url(url, options or RemoteOptions())
    return store


def is_folder(url: str) -> bool:
    """Whether ``url`` names a folder of this machine."""
    return urlsplit(url).scheme == "file"
