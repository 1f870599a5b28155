"""The remote store: where published packs and files lie for good. An interface, and a registry of what is behind it.

    packs/<pack id>             the pack's bytes
    packs/<pack id>.manifest    its manifest, whose BLAKE3 is the pack id
    files/<digest>              small files of versions, by their BLAKE3
    versions/<version id>.json  what a version consists of; its BLAKE3 is the version id

Every key is made of its content's digest, so writing twice has the effect of once. Methods block: call them on threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from torchrelay.common.errors import InvalidRequest


class RangeReader(ABC):
    """One object, opened to be read in ranges by several threads at once."""

    @abstractmethod
    def read_into(self, offset: int, view: memoryview) -> None:
        """Fills the whole view. Raises ``DataCorrupted`` when the object ends before, ``OSError``."""

    @abstractmethod
    def close(self) -> None: ...


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
    def open_range(self, key: str) -> RangeReader: ...

    @abstractmethod
    def size(self, key: str) -> int: ...

    @abstractmethod
    def delete(self, key: str) -> None:
        """Without effect when it is not there."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """The keys that begin with ``prefix``, which ends with a slash."""


# Imported when a URL asks for them: scheme -> (module, class).
_STORES = {"file": ("torchrelay.param_store.folder_store", "FolderStore")}


def open_remote(url: str) -> RemoteStore:
    """The store that ``url`` names. Raises ``InvalidRequest`` for a scheme without a store."""
    scheme = urlsplit(url).scheme
    if scheme not in _STORES:
        known = ", ".join(f"{name}:" for name in _STORES)
        raise InvalidRequest(f"no remote store for {url!r}; known are {known}", field="remote_url")
    module, name = _STORES[scheme]
    store: RemoteStore = getattr(import_module(module), name).from_url(url)
    return store
