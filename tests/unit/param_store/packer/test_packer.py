"""The packer: whatever it accepts is laid out exactly, whatever is wrong is refused with the file and the fault."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.param_store.model_folders import (
    Tensors,
    config_of,
    pack_refusal,
    read_index,
    shard_name,
    tensors_of,
    write_folder,
    write_index,
    write_shards,
)
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, tensors_by_segment
from torchrelay.param_store.model_files import INDEX_FILE
from torchrelay.param_store.packer import pack_writer
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.packer.checkpoint import check_weight_files
from torchrelay.param_store.packer.core import PackRefused
from torchrelay.param_store.packer.dtype_conversion import convert
from torchrelay.param_store.packer.safetensors_header import read_tensors
from torchrelay.transfer.manifest import PAGE_BYTES, Manifest, decode_manifest, pack_id_of

WEIGHTS = "model.safetensors"


def packed(folder: Path, out: Path, largest_slot_bytes: int = 0) -> tuple[Manifest, bytes]:
    result = pack(folder, out / "a.pack", largest_slot_bytes)
    encoded = (out / "a.manifest").read_bytes()
    assert result["pack_id"] == pack_id_of(encoded)
    return decode_manifest(encoded), (out / "a.pack").read_bytes()


def notes_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The notes that the packer prints while it packs the folder."""
    capsys.readouterr()
    with tempfile.TemporaryDirectory() as out:
        pack(folder, Path(out) / "a.pack", 0)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (notes,) = [line["notes"] for line in lines if line["stage"] == "validate"]
    return list(notes)


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
    assert pack_refusal(folder).detail == (
        "tensor 'model.embed_tokens.weight' is missing; config.json requires shape (96, 64)."
        " 'language_model.model.embed_tokens.weight' is of a multimodal model, which architectures in config.json must"
        " then name"
    )
    (folder / "config.json").write_text(config)
    tensors = {tensor.name: tensor for tensor in read_tensors(folder, WEIGHTS)}
    data = (folder / WEIGHTS).read_bytes()
    stored = Tensors({name: (t.dtype, t.shape, data[t.offset : t.offset + t.num_bytes]) for name, t in tensors.items()})
    more = {"model.norm.weight": stored.by_name["language_model.model.norm.weight"]}
    Tensors(stored.by_name | more).write(folder / WEIGHTS)
    assert pack_refusal(folder).detail == "tensor 'model.norm.weight' is the same as 'language_model.model.norm.weight'"


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


def test_unused_tensors_are_left_out_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tie_word_embeddings=True)
    plain = packed(write_folder(tmp_path / "plain", config), tmp_path)
    tensors = tensors_of(config)
    tensors.by_name["lm_head.weight"] = tensors.by_name["model.embed_tokens.weight"]
    for layer in range(2):
        tensors.by_name[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), bytes(32))
    tensors.by_name["score.weight"] = ("I8", (8,), bytes(8))
    tensors.write(write_folder(tmp_path / "old", config) / WEIGHTS)
    assert packed(tmp_path / "old", tmp_path) == plain
    assert notes_of(tmp_path / "plain", capsys) == []
    named = [{"name": name, "template": "x"} for name in ("default", "tool_use", "rag")]
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert notes_of(tmp_path / "plain", capsys)[0].endswith("left out: 'default', 'tool_use', 'rag'"), "for the file"
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    assert notes_of(tmp_path / "plain", capsys) == ["chat templates of tokenizer_config.json were left out: 'rag'"]
    assert notes_of(tmp_path / "old", capsys) == [
        "tensors that LlamaForCausalLM does not use were left out: 'lm_head.weight',"
        " 'model.layers.0.self_attn.rotary_emb.inv_freq', 'model.layers.1.self_attn.rotary_emb.inv_freq' and 1 more"
    ]


@pytest.mark.parametrize(
    ("declared", "dtype"),
    [
        ({}, "BF16"),
        ({"dtype": "float16"}, "BF16"),
        ({"torch_dtype": "bfloat16"}, "BF16"),
        ({"dtype": "float32"}, "F32"),
    ],
)
def test_mixed_dtypes_become_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], declared: dict[str, str], dtype: str
) -> None:
    """The declared one, if some weights have it, or else that of most numbers; rounded as torch rounds."""
    config = config_of(hidden_size=128, intermediate_size=512, **declared)
    folder = write_folder(tmp_path / "model", config, "BF16")
    mixed = Tensors()
    for name, (_, shape, data) in tensors_of(config, "F32").by_name.items():
        values = torch.frombuffer(bytearray(data), dtype=torch.float32)
        stored = values if "norm" in name else values.to(torch.bfloat16)
        kind = "F32" if "norm" in name else "BF16"
        mixed.by_name[name] = (kind, shape, stored.view(torch.uint8).numpy().tobytes())
    mixed.write(folder / WEIGHTS)
    manifest, data = packed(folder, tmp_path)
    assert manifest.dtype == dtype
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16}
    for entry in manifest.tensors:
        kind, _, stored_bytes = mixed.by_name[entry.name]
        values = torch.frombuffer(bytearray(stored_bytes), dtype=kinds[kind]).to(kinds[dtype])
        assert data[entry.offset : entry.offset + entry.num_bytes] == values.view(torch.uint8).numpy().tobytes()
    (note,) = notes_of(folder, capsys)
    other = "BF16" if dtype == "F32" else "F32"
    assert note.startswith(f"tensors of dtype {other} were converted to {dtype}: 'model.") and "more" in note


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("into", ["F32", "BF16", "F16"])
def test_conversion_rounds_as_torch(dtype: str, into: str) -> None:
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype == "F32":  # each bf16, and what lies just below, at and above the middle between it and the next
        wide = ((bits[:, None] << 16) + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).ravel()
        values = wide.view(torch.float32)
        values = torch.cat(
            [values, torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()]
        )
    else:
        values = bits.to(torch.int16).view(kinds[dtype])
    values = values[values.isfinite()]
    out = bytearray(len(values) * DTYPE_BYTES[into])
    convert(memoryview(values.view(torch.uint8).numpy().tobytes()), dtype, memoryview(out), into)
    assert bytes(out) == values.to(kinds[into]).view(torch.uint8).numpy().tobytes()


def test_single_file_beside_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The index decides, unless no file that it names is there, as after shards were merged."""
    single = packed(write_folder(tmp_path / "one"), tmp_path)
    named = write_folder(tmp_path / "named")
    write_index(named, {"weight_map": dict.fromkeys(tensors_of(config_of()).by_name, WEIGHTS)})
    stale = write_folder(tmp_path / "stale")
    write_index(stale, read_index(write_shards(tmp_path / "three")))
    both = write_shards(tmp_path / "both")
    (both / WEIGHTS).write_bytes(b"not safetensors")
    notes = {
        named: [],
        stale: [f"{INDEX_FILE} was left out, because no file that it names is in the upload"],
        both: [f"files that {INDEX_FILE} does not name were left out: '{WEIGHTS}'"],
    }
    for folder, expected in notes.items():
        check_weight_files([path.name for path in folder.iterdir()])
        assert packed(folder, tmp_path) == single
        assert notes_of(folder, capsys) == expected


def test_model_of_exact_slot_size_is_accepted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    manifest, _ = packed(folder, tmp_path)
    packed(folder, tmp_path, manifest.num_bytes)
    refused = pack_refusal(folder, largest_slot_bytes=manifest.num_bytes - 1)
    assert f"need {manifest.num_bytes:,} bytes and the largest slot has {manifest.num_bytes - 1:,}" in str(refused)


@settings(max_examples=300)
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
