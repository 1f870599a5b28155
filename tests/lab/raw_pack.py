"""Packs of random bytes, for tests that only move them: equal layers, embeddings of any size."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from torchrelay.transfer.manifest import PAGE_BYTES, Manifest, Segment, chunk_bytes_for, pack_id_of

_BLOCK_BYTES = 1 << 20
_STAMP_BYTES = 8


@dataclass(frozen=True, slots=True)
class RawPack:
    """A pack in a remote folder: segment 0 the embeddings, then the layers, then an empty head."""

    pack_id: str
    manifest: Manifest
    path: Path

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes


def publish(remote: Path, num_bytes: int, num_layers: int = 24, embedding_share: float = 0.0, seed: int = 0) -> RawPack:
    """Writes a pack to the folder of a remote store. Sizes are rounded down to whole pages."""
    folder = remote / "packs"
    folder.mkdir(parents=True, exist_ok=True)
    embeddings = _whole_pages(num_bytes * embedding_share)
    layer = _whole_pages((num_bytes - embeddings) / num_layers)
    num_bytes = embeddings + num_layers * layer
    ends = [embeddings + index * layer for index in range(num_layers + 1)]
    segments = [Segment(0, embeddings), *(Segment(end, end + layer) for end in ends[:-1]), Segment(ends[-1], ends[-1])]
    draft = folder / "draft"
    digests = _write(draft, num_bytes, chunk_bytes_for(num_bytes), seed)
    manifest = Manifest(
        architecture="LlamaForCausalLM",
        dtype="F32",
        config={"seed": seed},
        tensors=(),
        segments=tuple(segments),
        num_bytes=num_bytes,
        chunk_bytes=chunk_bytes_for(num_bytes),
        chunk_digests=tuple(digests),
    )
    encoded = manifest.encode()
    path = draft.rename(folder / pack_id_of(encoded))
    path.with_name(f"{path.name}.manifest").write_bytes(encoded)
    return RawPack(path.name, manifest, path)


def _write(path: Path, num_bytes: int, chunk_bytes: int, seed: int) -> list[bytes]:
    """Random bytes, no two chunks alike; the digest of each chunk. Nothing on the way compresses, so a block of them
    may come again under another stamp."""
    block = memoryview(random.Random(seed).randbytes(_BLOCK_BYTES) * -(-chunk_bytes // _BLOCK_BYTES))
    digests = []
    with path.open("wb") as file:
        for begin in range(0, num_bytes, chunk_bytes):
            size = min(chunk_bytes, num_bytes - begin)
            chunk = b"".join((begin.to_bytes(_STAMP_BYTES, "big"), block[: size - _STAMP_BYTES]))
            file.write(chunk)
            digests.append(blake3(chunk).digest())
    return digests


def _whole_pages(num_bytes: float) -> int:
    return int(num_bytes) // PAGE_BYTES * PAGE_BYTES
