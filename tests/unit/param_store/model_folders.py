"""Model folders for uploads, made without torch, and faulty ones."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.packer.core import PackRefused
from torchrelay.transfer.pack_layout import ITEM_BYTES

VOCAB_SIZE = 96
_FINITE = bytes(byte & 0xBF for byte in range(256))  # of a value's last byte: an exponent that is not all ones
_POSITIVE = bytes(byte & 0x3F | 1 for byte in range(256))


@dataclass
class Tensors:
    """The tensors of one safetensors file: name -> (dtype, shape, bytes)."""

    by_name: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], random_bytes: random.Random, last_bytes: bytes = _FINITE
    ) -> None:
        item_bytes = ITEM_BYTES.get(dtype) or 4
        data = bytearray(random_bytes.randbytes(math.prod(shape) * item_bytes))
        data[item_bytes - 1 :: item_bytes] = data[item_bytes - 1 :: item_bytes].translate(last_bytes)
        self.by_name[name] = (dtype, shape, bytes(data))

    def header(self) -> dict[str, Any]:
        position, entries = 0, {}
        for name, (dtype, shape, data) in self.by_name.items():
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
            position += len(data)
        return entries

    def write(self, path: Path, header: Mapping[str, Any] | bytes | None = None, tail: bytes = b"") -> None:
        encoded = header if isinstance(header, bytes) else json.dumps(header or self.header()).encode()
        body = b"".join(data for _, _, data in self.by_name.values())
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + body + tail)


def config_of(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        **changes,
    }


LARGER = config_of(hidden_size=128, intermediate_size=1024, num_hidden_layers=4)  # 28 chunks


def tensors_of(config: dict[str, Any], dtype: str = "F32", seed: int = 0) -> Tensors:
    """Random bytes for every tensor that the config asks for, in an order other than the pack's."""
    randomness = random.Random(seed)
    slots = [slot for segment in tensors_by_segment(read_config(config)) for slot in segment]
    randomness.shuffle(slots)
    tensors = Tensors()
    for slot in slots:
        last_bytes = _POSITIVE if slot.is_scale else _FINITE
        tensors.add(slot.name, slot.dtype or dtype, slot.shape, randomness, last_bytes)
    return tensors


def write_folder(folder: Path, config: dict[str, Any] | None = None, dtype: str = "F32", seed: int = 0) -> Path:
    """A whole folder with one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config or config_of()
    (folder / "config.json").write_text(json.dumps(config))
    tensors_of(config, dtype, seed).write(folder / "model.safetensors")
    write_documents(folder)
    return folder


@dataclass(frozen=True)
class StoredPack:
    """A pack in the folder of a remote store, with the bytes that were put there."""

    path: Path
    data: bytes

    @property
    def pack_id(self) -> str:
        return self.path.name

    @property
    def num_bytes(self) -> int:
        return len(self.data)


def put_pack(folder: Path, seed: int = 0, config: dict[str, Any] = LARGER) -> StoredPack:
    """Packs a model into the remote store below ``folder``."""
    packs = folder / "remote/packs"
    packs.mkdir(parents=True, exist_ok=True)
    pack_id = pack(write_folder(folder / f"model-{seed}", config, seed=seed), packs / "a.pack", 0)["pack_id"]
    (packs / "a.manifest").rename(packs / f"{pack_id}.manifest")
    path = (packs / "a.pack").rename(packs / pack_id)
    return StoredPack(path, path.read_bytes())


def pack_refusal(folder: Path, engines: Sequence[str] = (), largest_slot_bytes: int = 0) -> PackRefused:
    """The reason for which the packer refuses the folder."""
    with pytest.raises(PackRefused) as refused:
        pack(folder, folder.with_name("refused.pack"), largest_slot_bytes, tuple(engines))
    return refused.value


def write_documents(folder: Path) -> None:
    vocab = {f"t{i}": i for i in range(VOCAB_SIZE - 2)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": VOCAB_SIZE - 1, "content": "<s>", "special": True},
            {
                "id": VOCAB_SIZE,
                "content": "<image_soft_token>",
                "special": True,
            },  # as of Gemma 3, beyond the embeddings
        ],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def write_shards(folder: Path, config: dict[str, Any] | None = None, count: int = 3) -> Path:
    """The same in shards with an index; tensors are dealt out in turn, so that layers cross shards."""
    write_folder(folder, config)
    (folder / "model.safetensors").unlink()
    whole = tensors_of(config or config_of())
    weight_map: dict[str, str] = {}
    shards = [Tensors() for _ in range(count)]
    for number, (name, tensor) in enumerate(whole.by_name.items()):
        shards[number % count].by_name[name] = tensor
        weight_map[name] = shard_name(number % count + 1, count)
    for number, shard in enumerate(shards):
        shard.write(folder / shard_name(number + 1, count))
    total = sum(len(data) for _, _, data in whole.by_name.values())
    write_index(folder, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return folder


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
