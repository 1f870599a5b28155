"""The manifest: what a pack contains and where. Its BLAKE3 digest is the pack's id.

A pack is one byte range in execution order. Segment 0 is the embeddings, segments 1..L the layers, segment L+1 the
final norm and the head (tied weights are stored once). Segments begin on pages, so that each can be mapped and copied
by itself; groups that a fused projection reads (q|k|v, gate|up) are contiguous. A pack of ``OPAQUE_FORMAT`` has as many
segments, with the tensors in the order of their files: only its engine knows the layers.

Third-party libraries are imported where they are used: the engine reads manifests in environments that have only torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torchrelay.transfer.errors import ProtocolViolation

FORMAT_VERSION, OPAQUE_FORMAT = 1, 2
PAGE_BYTES = 4096
MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 4 << 20
TARGET_CHUNKS = 256  # filling n hosts through a chain of c chunks takes 1 + (n - 1) / c of one hop
DIGEST_BYTES = 32


class TensorEntry(NamedTuple):
    """A tensor: Hugging Face name, shape, dtype as safetensors names it, of ``pack_layout.ITEM_BYTES``, byte offset in
    the pack, and size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


class Segment(NamedTuple):
    """A byte range [begin, end) of the pack."""

    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The immutable description of one pack; ``encode()`` is canonical, so equal manifests have equal ids."""

    format_version: int = FORMAT_VERSION
    architecture: str
    dtype: str
    config: dict[str, Any]  # the model's config.json, as uploaded
    tensors: tuple[TensorEntry, ...]
    segments: tuple[Segment, ...]
    num_bytes: int
    chunk_bytes: int
    chunk_digests: tuple[bytes, ...]  # BLAKE3, one per chunk

    def encode(self) -> bytes:
        """Canonical JSON: sorted keys, no whitespace, digests in base64."""
        import msgspec

        return msgspec.json.encode(self, order="sorted")

    @property
    def is_opaque(self) -> bool:
        """Whether only the engine of the model knows what its tensors are."""
        return self.format_version == OPAQUE_FORMAT

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_digests)

    def chunk_range(self, index: int) -> Segment:
        """The byte range of a chunk; the last chunk may be shorter than ``chunk_bytes``."""
        begin = index * self.chunk_bytes
        return Segment(begin, min(begin + self.chunk_bytes, self.num_bytes))

    def chunks_of(self, segment: int) -> range:
        """The chunks that overlap a segment. The segment may be used once all of them are verified."""
        span = self.segments[segment]
        if span.begin == span.end:
            return range(0)
        return range(span.begin // self.chunk_bytes, (span.end - 1) // self.chunk_bytes + 1)


def decode_manifest(encoded: bytes) -> Manifest:
    """Decodes a manifest that the caller has compared with its pack id. Raises ``msgspec.ValidationError``."""
    import msgspec

    return msgspec.json.decode(encoded, type=Manifest)


def checked_manifest(encoded: bytes) -> Manifest:
    """Decodes a manifest that may come from a peer. Raises ``ProtocolViolation`` when its numbers do not agree."""
    import msgspec

    try:
        manifest = decode_manifest(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"malformed manifest: {error}") from error
    if manifest.chunk_bytes <= 0 or manifest.num_bytes < 0:
        raise ProtocolViolation("the manifest's chunk_bytes must be positive and its num_bytes non-negative")
    if manifest.num_chunks != -(-manifest.num_bytes // manifest.chunk_bytes):
        raise ProtocolViolation(
            f"the manifest has {manifest.num_chunks} digests for {manifest.num_bytes} bytes "
            f"in chunks of {manifest.chunk_bytes}"
        )
    if any(len(digest) != DIGEST_BYTES for digest in manifest.chunk_digests):
        raise ProtocolViolation(f"the manifest's digests must have {DIGEST_BYTES} bytes each")
    return manifest


def pack_id_of(encoded: bytes) -> str:
    """The id of the pack: the BLAKE3 digest of the encoded manifest, hence of every chunk's digest."""
    from blake3 import blake3

    return blake3(encoded).hexdigest()


def chunk_bytes_for(pack_bytes: int) -> int:
    """The chunk size of a pack: 1/256 of it in whole pages, between 256 KiB and 4 MiB."""
    wanted = -(-pack_bytes // TARGET_CHUNKS)
    return min(max(-(-wanted // PAGE_BYTES) * PAGE_BYTES, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
