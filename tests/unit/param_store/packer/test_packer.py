"""The packer: whatever it accepts is laid out exactly, whatever is wrong is refused with the file and the fault."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.param_store.model_folders import (
    Tensors,
    config_of,
    read_index,
    shard_name,
    tensors_of,
    write_folder,
    write_index,
    write_shards,
)
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.param_store.packer import pack_writer
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.packer.core import PackRefused
from torchrelay.param_store.packer.safetensors_header import read_tensors
from torchrelay.transfer.manifest import PAGE_BYTES, Manifest, decode_manifest, pack_id_of

WEIGHTS = "model.safetensors"


def packed(folder: Path, out: Path, largest_slot_bytes: int = 0) -> tuple[Manifest, bytes]:
    result = pack(folder, out / "a.pack", largest_slot_bytes)
    encoded = (out / "a.manifest").read_bytes()
    assert result["pack_id"] == pack_id_of(encoded)
    return decode_manifest(encoded), (out / "a.pack").read_bytes()


@pytest.mark.parametrize(
    ("architecture", "tied", "dtype"),
    [("LlamaForCausalLM", False, "F32"), ("Qwen2ForCausalLM", True, "BF16"), ("Qwen3ForCausalLM", False, "F16")],
)
def test_pack_has_checkpoint_bytes_in_execution_order(
    tmp_path: Path, architecture: str, tied: bool, dtype: str
) -> None:
    config = config_of(architecture, tie_word_embeddings=tied, hidden_size=128, intermediate_size=512)
    manifest, data = packed(write_folder(tmp_path / "model", config, dtype), tmp_path)
    source = tensors_of(config, dtype).by_name
    for entry in manifest.tensors:
        assert data[entry.offset : entry.offset + entry.num_bytes] == source[entry.name][2]
        assert (entry.dtype, entry.shape) == source[entry.name][:2]
    slots = [slot for segment in tensors_by_segment(read_config(config)) for slot in segment]
    assert [entry.name for entry in manifest.tensors] == [slot.name for slot in slots]
    for (before, left), (after, right) in pairwise(zip(manifest.tensors, slots, strict=True)):
        if left.group == right.group:
            assert before.offset + before.num_bytes == after.offset
        else:
            assert after.offset % 64 == 0
    assert all(segment.begin % PAGE_BYTES == 0 for segment in manifest.segments)
    assert len(manifest.segments) == 4
    assert manifest.num_bytes == len(data)
    assert len(data) % PAGE_BYTES == 0
    assert manifest.num_chunks > 1
    for index, digest in enumerate(manifest.chunk_digests):
        span = manifest.chunk_range(index)
        assert blake3(data[span.begin : span.end]).digest() == digest
    assert manifest.config == config


def test_shards_give_same_pack_as_single_file(tmp_path: Path) -> None:
    single = packed(write_folder(tmp_path / "one"), tmp_path)
    assert packed(write_shards(tmp_path / "three"), tmp_path) == single


def multimodal_folder(folder: Path, prefix: str) -> Path:
    """A folder whose text part is the default model's, with its tensors below ``prefix``, and a vision tower."""
    text = config_of()
    tensors = tensors_of(text)
    named = {
        prefix + name.removeprefix("model."): tensor for name, tensor in tensors.by_name.items() if "lm_" not in name
    }
    head = {"lm_head.weight": tensors.by_name["lm_head.weight"]}
    write_folder(folder, text)
    Tensors(named | head | {"vision_tower.patch.weight": ("I8", (4,), bytes(4))}).write(folder / WEIGHTS)
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text | {"model_type": "llama"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_multimodal_checkpoint_is_packed_alone(tmp_path: Path, prefix: str) -> None:
    plain, plain_bytes = packed(write_folder(tmp_path / "plain"), tmp_path)
    manifest, packed_bytes = packed(multimodal_folder(tmp_path / "model", prefix), tmp_path)
    assert (manifest.tensors, packed_bytes) == (plain.tensors, plain_bytes)


def test_faulty_multimodal_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = multimodal_folder(tmp_path / "model", "language_model.model.")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(config_of()))
    with pytest.raises(PackRefused) as refused:
        packed(folder, tmp_path)
    assert refused.value.detail == (
        "tensor 'model.embed_tokens.weight' is missing; config.json requires shape (96, 64)."
        " 'language_model.model.embed_tokens.weight' is of a multimodal model, which architectures in config.json must"
        " then name"
    )
    (folder / "config.json").write_text(config)
    tensors = {tensor.name: tensor for tensor in read_tensors(folder, WEIGHTS)}
    data = (folder / WEIGHTS).read_bytes()
    stored = Tensors({name: (t.dtype, t.shape, data[t.offset : t.offset + t.num_bytes]) for name, t in tensors.items()})
    for surplus, detail in {
        "model.norm.weight": "tensor 'model.norm.weight' is the same as 'language_model.model.norm.weight'",
        "audio_tower.weight": "tensor 'audio_tower.weight' is not part of LlamaForCausalLM",
    }.items():
        more = {surplus: stored.by_name["language_model.model.norm.weight"]}
        Tensors(stored.by_name | more).write(folder / WEIGHTS)
        with pytest.raises(PackRefused) as refused:
            packed(folder, tmp_path)
        assert refused.value.detail == detail


def test_index_alone_decides_about_shards(tmp_path: Path) -> None:
    """Files may have any names, the total may be wrong, and what the index does not name is left out."""
    folder = write_shards(tmp_path / "three")
    index = read_index(folder)
    (folder / shard_name(2, 3)).rename(folder / "Second_part.safetensors")
    places = {shard_name(2, 3): "Second_part.safetensors"}
    index["weight_map"] = {name: places.get(file, file) for name, file in index["weight_map"].items()}
    index["metadata"]["total_size"] = 1
    write_index(folder, index)
    (folder / shard_name(3, 4)).write_bytes(b"not safetensors")
    third = tensors_of(config_of())
    header = {"x": ("F32", (2,), bytes(8))} | {
        name: third.by_name[name] for name, file in index["weight_map"].items() if file == shard_name(3, 3)
    }
    Tensors(header).write(folder / shard_name(3, 3))
    assert packed(folder, tmp_path) == packed(write_folder(tmp_path / "one"), tmp_path)


def test_harmless_surplus_is_left_out(tmp_path: Path) -> None:
    config = config_of(tie_word_embeddings=True)
    plain = packed(write_folder(tmp_path / "plain", config), tmp_path)
    tensors = tensors_of(config)
    tensors.by_name["lm_head.weight"] = tensors.by_name["model.embed_tokens.weight"]
    tensors.by_name["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), bytes(32))
    tensors.write(write_folder(tmp_path / "old", config) / WEIGHTS)
    assert packed(tmp_path / "old", tmp_path) == plain


def test_model_of_exact_slot_size_is_accepted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    manifest, _ = packed(folder, tmp_path)
    packed(folder, tmp_path, manifest.num_bytes)
    with pytest.raises(PackRefused) as refused:
        pack(folder, tmp_path / "a.pack", manifest.num_bytes - 1)
    assert f"need {manifest.num_bytes:,} bytes and the largest slot has {manifest.num_bytes - 1:,}" in str(
        refused.value
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_header_parses_or_is_refused(data: st.DataObject) -> None:
    header = bytearray(json.dumps(tensors_of(config_of(num_hidden_layers=1)).header()).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(
            st.sampled_from(b'{}[]":,-0123456789eE\\nul \xff')
        )
    body = bytes(data.draw(st.integers(0, 64)))
    with tempfile.TemporaryDirectory() as folder:
        length = data.draw(st.sampled_from([len(header), len(header) - 1, len(header) + 8, 2**63]))
        (Path(folder) / WEIGHTS).write_bytes(length.to_bytes(8, "little") + header + body)
        try:
            tensors = read_tensors(Path(folder), WEIGHTS)
        except PackRefused as refused:
            assert refused.file == WEIGHTS and refused.detail
        else:
            assert sum(tensor.num_bytes for tensor in tensors) <= len(header) + len(body)


def test_pack_reaches_disk_while_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at its end, that takes minutes without progress."""
    folder = write_folder(tmp_path / "model", config_of())
    monkeypatch.setattr(pack_writer, "_SYNC_EVERY_BYTES", 100_000)
    monkeypatch.setattr(pack_writer, "chunk_bytes_for", lambda num_bytes: PAGE_BYTES)
    sizes: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    pack(folder, tmp_path / "a.pack", 0)
    assert len(sizes) >= 2 and all(after - before < 200_000 for before, after in pairwise([0, *sizes]))
