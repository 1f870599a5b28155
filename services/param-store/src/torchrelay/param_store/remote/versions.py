"""Published versions: immutable documents in the remote store that name packs and files by digest."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec
from blake3 import blake3

from torchrelay.common.errors import DataCorrupted, NotFound, TorchrelayError, Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.tokens.prefix_hashes import ROUTING_TOKENS
from torchrelay.modelspec.config import ModelConfig, read_config
from torchrelay.modelspec.tensor_order import DTYPE_BYTES
from torchrelay.param_store.model_files import GENERATION, eos_token_ids
from torchrelay.param_store.remote.keys import file_key, manifest_key, pack_key, version_key
from torchrelay.param_store.remote.remote_store import RemoteStore
from torchrelay.transfer.manifest import Manifest, decode_manifest, pack_id_of

log = get_logger(__name__)


class VersionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The packs and files of a version. ``encode()`` is canonical; its BLAKE3 is the version's id."""

    format_version: int = 1
    weights: dict[str, str]  # variant, such as "BF16/tp1/rank0" -> pack id
    files: dict[str, str]  # name -> BLAKE3
    routing_block_tokens: int = ROUTING_TOKENS

    def encode(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A version with its pack's manifest and its model's config."""

    version_id: str
    document: VersionDocument
    pack_id: str
    manifest: Manifest
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    stored_bytes: int

    @property
    def kv_dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.manifest.dtype]


class Versions:
    """Publishes, describes and deletes versions. Methods block; one change at a time.

    NOTE: the lock holds within one store. All uploads and deletions of an install go through one store (the gateway's),
    so that no version can be published while another store deletes the packs that it shares.
    """

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._lock = threading.Lock()

    def publish(self, pack_path: Path, files: dict[str, Path]) -> Version:
        """Publishes a pack and its files as a version. The document comes last: it alone makes the version visible.

        Raises ``OSError`` or ``Unavailable`` when the remote store fails; then removes what no version names, as far as
        the store allows.
        """
        manifest = pack_path.with_suffix(".manifest").read_bytes()
        pack_id = pack_id_of(manifest)
        with self._lock:
            digests = {name: file_digest(path) for name, path in files.items()}
            variant = f"{decode_manifest(manifest).dtype}/tp1/rank0"
            document = VersionDocument(weights={variant: pack_id}, files=digests)
            encoded = document.encode()
            version_id = blake3(encoded).hexdigest()
            try:
                for name, path in files.items():
                    self._remote.put_file(file_key(digests[name]), path)
                self._remote.put_file(pack_key(pack_id), pack_path)
                self._remote.put_bytes(manifest_key(pack_id), manifest)
                self._remote.put_bytes(version_key(version_id), encoded)
            except (OSError, Unavailable):
                self._clean_up(document)
                raise
        return self.describe(version_id)

    def _clean_up(self, document: VersionDocument) -> None:
        try:
            for key in _keys(document) - self._named(self._ids()):
                self._remote.delete(key)
        except (OSError, TorchrelayError) as error:  # the next upload of the model reuses what is left
            log.warning("unpublished_left_behind", error=str(error))

    def describe(self, version_id: str) -> Version:
        """Raises ``NotFound``, or ``DataCorrupted`` if the remote store's bytes do not match their keys."""
        document = self._document(version_id)
        pack_id = next(iter(document.weights.values()))
        encoded = self._remote.get_bytes(manifest_key(pack_id))
        if pack_id_of(encoded) != pack_id:
            raise DataCorrupted(f"the manifest of pack {pack_id} is damaged in the remote store")
        manifest = decode_manifest(encoded)
        generation = self.read_file(document.files[GENERATION]) if GENERATION in document.files else b"{}"
        return Version(
            version_id=version_id,
            document=document,
            pack_id=pack_id,
            manifest=manifest,
            config=read_config(manifest.config),
            eos_token_ids=tuple(eos_token_ids(json.loads(generation), manifest.config)),
            stored_bytes=manifest.num_bytes
            + len(encoded)
            + sum(self._remote.size(file_key(digest)) for digest in document.files.values()),
        )

    def read_file(self, digest: str) -> bytes:
        """A small file of a version, verified. Raises ``NotFound``, ``DataCorrupted``."""
        data = self._remote.get_bytes(file_key(digest))
        if blake3(data).hexdigest() != digest:
            raise DataCorrupted(f"the file {digest} is damaged in the remote store")
        return data

    def delete(self, version_id: str) -> int:
        """Deletes the version and the packs and files that no other version names; returns the bytes freed."""
        with self._lock:
            document = self._document(version_id)
            named = self._named(other for other in self._ids() if other != version_id)
            self._remote.delete(version_key(version_id))  # first: a version must never name what is missing
            return sum(self._delete(key) for key in sorted(_keys(document) - named))

    def _named(self, version_ids: Iterable[str]) -> set[str]:
        """The keys of all packs and files of these versions."""
        return {key for version_id in version_ids for key in _keys(self._document(version_id))}

    def _delete(self, key: str) -> int:
        try:
            num_bytes = self._remote.size(key)
        except NotFound:
            return 0
        self._remote.delete(key)
        return num_bytes

    def _ids(self) -> list[str]:
        return [key.removeprefix("versions/").removesuffix(".json") for key in self._remote.list("versions/")]

    def _document(self, version_id: str) -> VersionDocument:
        try:
            encoded = self._remote.get_bytes(version_key(version_id))
        except NotFound:
            raise NotFound(f"there is no version {version_id}", field="version_id") from None
        if blake3(encoded).hexdigest() != version_id:
            raise DataCorrupted(f"the document of version {version_id} is damaged in the remote store")
        return msgspec.json.decode(encoded, type=VersionDocument)


def _keys(document: VersionDocument) -> set[str]:
    """The keys of the document's packs and files."""
    files = {file_key(digest) for digest in document.files.values()}
    packs = document.weights.values()
    return files | {pack_key(pack_id) for pack_id in packs} | {manifest_key(pack_id) for pack_id in packs}


def file_digest(path: Path) -> str:
    """BLAKE3 of a file, read in pieces."""
    digest = blake3()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
