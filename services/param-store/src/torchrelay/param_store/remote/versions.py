"""Published versions: immutable documents in the remote store that name packs and files by digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3
from msgspec import UNSET, UnsetType

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, DataCorrupted, NotFound, TorchrelayError, Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.tokens.prefix_hashes import ROUTING_TOKENS
from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.opaque import OpaqueModel, read_model
from torchrelay.param_store.embedding import EmbeddingSpec, model_embedding
from torchrelay.param_store.model_files import ADAPTER_FILES, eos_token_ids
from torchrelay.param_store.remote.keys import (
    compiled_key,
    file_key,
    manifest_key,
    owner_key,
    pack_key,
    parse_pack_key,
    version_key,
)
from torchrelay.param_store.remote.remote_store import RemoteStore
from torchrelay.transfer.manifest import Manifest, decode_manifest, pack_id_of

log = get_logger(__name__)


class VersionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The packs and files of a version. ``encode()`` is canonical; its BLAKE3 digest is the version's id.

    An adapter names the packs and files of its base, and two files more.
    """

    format_version: int = 1
    weights: dict[str, str]  # variant, such as "BF16/tp1/rank0" -> pack id
    files: dict[str, str]  # name -> BLAKE3
    routing_block_tokens: int = ROUTING_TOKENS
    base: str | UnsetType = UNSET  # the version that an adapter changes

    @property
    def base_id(self) -> str:
        """``base``, or empty."""
        return "" if isinstance(self.base, UnsetType) else self.base

    def encode(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A version with its pack's manifest and its model's config."""

    version_id: str
    document: VersionDocument
    pack_id: str
    manifest: Manifest
    config: ModelConfig | OpaqueModel
    eos_token_ids: tuple[int, ...]
    embedding: EmbeddingSpec | None
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class StoredVersion:
    version_id: str
    published_unix_us: int  # latest, by the remote store's clock


class Versions:
    """Publishes, lists, describes and deletes versions. Methods block.

    Uploads to the remote store run concurrently; only deletions and the step that makes a version visible take turns.

    NOTE: the lock applies within one store. All uploads and deletions of an install go through one store (the
    gateway's), so that no version can be published while another store deletes the packs that it shares.
    """

    def __init__(self, remote: RemoteStore, kept: Callable[[], Collection[str]] = tuple) -> None:
        """``kept`` returns the versions that must not be deleted: their uploads have not been confirmed yet."""
        self._remote = remote
        self._kept = kept
        self._lock = threading.Lock()
        self._keys_of: dict[str, frozenset[str]] = {}  # packs and files of the versions read so far
        self._being_published: list[frozenset[str]] = []  # keys of versions whose documents are not yet stored

    def publish(
        self, pack_path: Path, files: dict[str, Path], on_visible: Callable[[str], None] = lambda version_id: None
    ) -> Version:
        """Publishes a pack and its files as a version. The document is stored last and makes the version visible.

        ``on_visible`` gets the version's id just before, while no deletion can run. When the remote store fails,
        removes the files that no version names, as far as the store allows, and raises ``OSError`` or ``Unavailable``.
        """
        manifest = pack_path.with_suffix(".manifest").read_bytes()
        pack_id = pack_id_of(manifest)
        digests = {name: file_digest(path) for name, path in files.items()}
        variant = f"{decode_manifest(manifest).dtype}/tp1/rank0"
        document = VersionDocument(weights={variant: pack_id}, files=digests)

        def put_pack() -> None:
            self._remote.put_file(pack_key(pack_id), pack_path)
            self._remote.put_bytes(manifest_key(pack_id), manifest)

        return self._publish(document, files, put_pack, on_visible)

    def publish_adapter(self, base: str, files: dict[str, Path], on_visible: Callable[[str], None]) -> Version:
        """Publishes the files of an adapter of the version ``base``, as ``publish`` does. Also raises ``NotFound``."""
        of_base = self._document(base)
        digests = {**of_base.files, **{name: file_digest(path) for name, path in files.items()}}
        document = msgspec.structs.replace(of_base, files=digests, base=base)
        # Once its keys are spared, either the base is gone or its pack stays.
        return self._publish(document, files, lambda: self._remote.size(version_key(base)), on_visible)

    def _publish(
        self,
        document: VersionDocument,
        files: dict[str, Path],
        put_pack: Callable[[], object],
        on_visible: Callable[[str], None],
    ) -> Version:
        encoded, keys = document.encode(), _keys(document)
        version_id = blake3(encoded).hexdigest()
        try:
            with self._spared(keys):
                put_pack()
                for name, path in files.items():
                    self._remote.put_file(file_key(document.files[name]), path)
                with self._lock:
                    on_visible(version_id)
                    self._remote.put_bytes(version_key(version_id), encoded)
        except (OSError, Unavailable):
            with self._lock:
                self._clean_up(keys)
            raise
        return self.describe(version_id)

    @contextmanager
    def _spared(self, keys: frozenset[str]) -> Iterator[None]:
        """Protects these keys from deletions during the block; earlier deletions have ended when it begins."""
        with self._lock:
            self._being_published.append(keys)
        try:
            yield
        finally:
            with self._lock:
                self._being_published.remove(keys)

    def _clean_up(self, keys: frozenset[str]) -> None:
        try:
            for key in keys - self._named():
                self._remote.delete(key)
        except (OSError, TorchrelayError) as error:  # the next upload of the model reuses the files
            log.warning("unpublished_left_behind", error=str(error))

    def describe(self, version_id: str) -> Version:
        """Reads a version. Raises ``NotFound``, or ``DataCorrupted`` if stored bytes do not match their keys."""
        document = self._document(version_id)
        pack_id = next(iter(document.weights.values()))
        encoded = self._remote.get_bytes(manifest_key(pack_id))
        if pack_id_of(encoded) != pack_id:
            raise DataCorrupted(f"the manifest of pack {pack_id} is damaged in the remote store")
        manifest = decode_manifest(encoded)
        files, config = document.files, read_model(manifest.config, is_opaque=manifest.is_opaque)

        def read(name: str) -> bytes | None:
            return self.read_file(files[name]) if name in files else None

        return Version(
            version_id=version_id,
            document=document,
            pack_id=pack_id,
            manifest=manifest,
            config=config,
            eos_token_ids=tuple(eos_token_ids(read, manifest.config)),
            embedding=model_embedding(read, config),
            stored_bytes=self._stored_bytes(document, manifest.num_bytes + len(encoded)),
        )

    def _stored_bytes(self, document: VersionDocument, pack_bytes: int) -> int:
        """The size of a version's pack and files; of an adapter, which shares those of its base, its own files'."""
        own = ADAPTER_FILES if document.base_id else document.files
        num_bytes = sum(self._remote.size(file_key(document.files[name])) for name in own)
        return num_bytes if document.base_id else num_bytes + pack_bytes

    def read_file(self, digest: str) -> bytes:
        """The verified content of a version's small file. Raises ``NotFound``, ``DataCorrupted``."""
        data = self._remote.get_bytes(file_key(digest))
        check_digest(blake3(data), digest)
        return data

    def size(self, key: str) -> int:
        """The size of a file or an archive by its key in the remote store. Raises ``NotFound``."""
        return self._remote.size(key)

    def read_part(self, key: str, begin: int, num_bytes: int) -> bytes:
        """A part of a file or an archive, not verified. Raises ``NotFound``, ``DataCorrupted``."""
        part, reader = bytearray(num_bytes), self._remote.open_range(key)
        try:
            reader.read_into(begin, memoryview(part), threading.Event())
        finally:
            reader.close()
        return bytes(part)

    def put_object(self, key: str, path: Path) -> None:
        """Stores a tenant's file, which no version names."""
        self._remote.put_file(key, path)

    def delete_object(self, key: str) -> None:
        """Deletes it; no effect if it is missing."""
        self._remote.delete(key)

    def keep_compiled(self, pack_id: str, digest: str, archive: bytes) -> None:
        """Stores the archive until the pack is deleted. Raises ``NotFound`` if there is no pack."""
        self._remote.size(pack_key(pack_id))
        self._remote.put_bytes(compiled_key(pack_id, digest), archive)

    def all(self) -> list[StoredVersion]:
        """Every version in the remote store."""
        return [
            StoredVersion(stored.key.removeprefix("versions/").removesuffix(".json"), stored.modified_unix_us)
            for stored in self._remote.objects("versions/")
        ]

    def delete(self, version_id: str, published_unix_us: int = 0) -> int:
        """Deletes the version and the packs and files that no other version names; returns the bytes freed.

        Raises ``NotFound``, and ``Conflict`` if an upload keeps the version, or if ``published_unix_us`` is given and
        the version has been published again since.
        """
        with self._lock:
            stored = {version.version_id: version.published_unix_us for version in self.all()}
            if version_id not in stored:
                raise NotFound(f"there is no version {version_id}", field="version_id")
            if version_id in self._kept() or published_unix_us not in (0, stored[version_id]):
                raise Conflict(f"version {version_id} was published again", field="version_id")
            keys = self._read_keys(stored)[version_id]
            self._remote.delete(version_key(version_id))  # first: a version must never name what is missing
            del self._keys_of[version_id]
            gone = keys - self._named(stored.keys() - {version_id})
            if any(parse_pack_key(key)[0] for key in gone):
                gone |= {each.key for each in self._remote.objects("compiled/") if owner_key(each.key) in gone}
            return sum(self._delete(key) for key in sorted(gone))

    def delete_unnamed(self, older_than_s: float) -> int:
        """Deletes packs and files that no version names and that were stored at least ``older_than_s`` ago: a process
        died while it published or deleted them. Returns the bytes freed.
        """
        before_unix_us = now_unix_us() - int(older_than_s * 1e6)
        with self._lock:
            named = self._named()
            prefixes = ("packs/", "files/", "compiled/")
            objects = [stored for prefix in prefixes for stored in self._remote.objects(prefix)]
            old = [stored for stored in objects if stored.modified_unix_us <= before_unix_us]
            unnamed = [stored for stored in old if owner_key(stored.key) not in named]
            for stored in unnamed:
                self._remote.delete(stored.key)
                log.info("unnamed_deleted", key=stored.key, num_bytes=stored.num_bytes)
        return sum(stored.num_bytes for stored in unnamed)

    def _named(self, version_ids: Collection[str] | None = None) -> set[str]:
        """The keys of all packs and files of these versions (None: all), and of the versions being published."""
        stored = [version.version_id for version in self.all()] if version_ids is None else version_ids
        return set().union(*self._read_keys(stored).values(), *self._being_published)

    def _read_keys(self, version_ids: Collection[str]) -> dict[str, frozenset[str]]:
        """The keys that each of these versions names. Documents never change, so each is read once."""
        for version_id in version_ids:
            if version_id not in self._keys_of:
                self._keys_of[version_id] = _keys(self._document(version_id))
        return {version_id: self._keys_of[version_id] for version_id in version_ids}

    def _delete(self, key: str) -> int:
        try:
            num_bytes = self._remote.size(key)
        except NotFound:
            return 0
        self._remote.delete(key)
        return num_bytes

    def _document(self, version_id: str) -> VersionDocument:
        try:
            encoded = self._remote.get_bytes(version_key(version_id))
        except NotFound:
            raise NotFound(f"there is no version {version_id}", field="version_id") from None
        if blake3(encoded).hexdigest() != version_id:
            raise DataCorrupted(f"the document of version {version_id} is damaged in the remote store")
        return msgspec.json.decode(encoded, type=VersionDocument)


def _keys(document: VersionDocument) -> frozenset[str]:
    """The keys of the document's packs and files."""
    files, packs = document.files.values(), document.weights.values()
    return frozenset((*map(file_key, files), *map(pack_key, packs), *map(manifest_key, packs)))


def check_digest(hasher: blake3, digest: str) -> None:
    """Raises ``DataCorrupted`` if the content of a file does not have its digest."""
    if hasher.hexdigest() != digest:
        raise DataCorrupted(f"the file {digest} is damaged in the remote store")


def file_digest(path: Path) -> str:
    """BLAKE3 of a file, read in pieces."""
    digest = blake3()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
