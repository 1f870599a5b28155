"""Packs of int8 weights: the upload's bytes and scales as they are, or made of its weights; what is hostile is refused
by file and tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import (
    FAMILIES,
    MULTIMODAL,
    declare_embeddings,
    make_checkpoint,
    make_encoder,
    make_headless,
    make_multimodal_checkpoint,
)
from tests.support.int8_checkpoints import int8_checkpoint
from tests.support.quantized_checkpoints import quantized_checkpoint
from tests.unit.param_store.model_folders import Tensors, config_of, pack_refusal, tensors_of, write_folder
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT
from torchrelay.param_store.packer import pack_writer
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.packer.core import PackRefused
from torchrelay.transfer.manifest import decode_manifest

CONFIG = config_of(quantization_config=dict(INT8_PER_OUTPUT))
WEIGHT = "model.layers.1.mlp.down_proj.weight"
SCALE = f"{WEIGHT}_scale"
NUM_OUT = 64


def rewrite(
    folder: Path, config: dict[str, Any] = CONFIG, **changes: tuple[str, tuple[int, ...], bytes] | None
) -> Path:
    """A folder in bf16 whose tensor ``weight`` or ``scale`` is replaced, or missing."""
    write_folder(folder, config, "BF16")
    tensors = tensors_of(config, "BF16")
    for name, tensor in changes.items():
        del tensors.by_name[{"weight": WEIGHT, "scale": SCALE}[name]]
        if tensor is not None:
            tensors.by_name[{"weight": WEIGHT, "scale": SCALE}[name]] = tensor
    tensors.write(folder / "model.safetensors")
    return folder


def scales_of(last: float, dtype: str = "F32", shape: tuple[int, ...] = (NUM_OUT, 1)) -> tuple[str, Any, bytes]:
    """Scales of 1, the last of them ``last``."""
    numbers = struct.pack(f"<{NUM_OUT}f", *[1.0] * (NUM_OUT - 1), last)
    if dtype == "BF16":  # the upper halves
        numbers = b"".join(numbers[at + 2 : at + 4] for at in range(0, len(numbers), 4))
    return dtype, shape, numbers


def packed(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    path = folder.with_suffix(".pack")
    pack(folder, path, 0)
    data = path.read_bytes()
    manifest = decode_manifest(path.with_suffix(".manifest").read_bytes())
    assert manifest.dtype == "BF16"
    return {
        entry.name: (entry.dtype, entry.shape, data[entry.offset : entry.offset + entry.num_bytes])
        for entry in manifest.tensors
    }


@pytest.mark.parametrize("shape", [(NUM_OUT, 1), (NUM_OUT,)])
def test_int8_weights_and_scales_are_packed_as_they_are(tmp_path: Path, shape: tuple[int, ...]) -> None:
    scales = scales_of(2.0, "BF16", shape)
    expected: Tensors = tensors_of(CONFIG, "BF16")
    actual = packed(rewrite(tmp_path / "model", scale=scales))
    assert actual.pop(SCALE) == ("BF16", (NUM_OUT, 1), scales[2])
    del expected.by_name[SCALE]
    assert actual == expected.by_name
    assert actual[WEIGHT][0] == "I8"


@pytest.mark.parametrize(
    ("scale", "fault"),
    [
        (float("nan"), "element 63 is NaN; all weights must be finite numbers"),
        (float("inf"), "element 63 is infinite; all weights must be finite numbers"),
        (0.0, "element 63 is zero; all scales must be positive numbers"),
        (-0.0, "element 63 is zero; all scales must be positive numbers"),
        (-1.0, "element 63 is negative; all scales must be positive numbers"),
    ],
)
def test_hostile_scales_are_refused(tmp_path: Path, scale: float, fault: str) -> None:
    folder = rewrite(tmp_path / "model", scale=scales_of(scale, "BF16"))
    assert str(pack_refusal(folder)) == f"model.safetensors: tensor '{SCALE}': {fault}"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"scale": None}, f"'{SCALE}' is missing; config.json requires shape (64, 1)"),
        ({"scale": ("F32", (1,), bytes(4))}, f"'{SCALE}': shape (1,) differs from (64, 1), which config.json requires"),
        ({"scale": ("F32", (64, 2), bytes(512))}, f"'{SCALE}': shape (64, 2) differs from (64, 1), which"),
        ({"scale": ("F32", (1, 64), bytes(256))}, f"'{SCALE}': shape (1, 64) differs from (64, 1), which"),
        ({"scale": ("I8", (64, 1), bytes(64))}, f"'{SCALE}': dtype I8 is not supported; supported are F32, BF16, F16"),
        ({"weight": ("BF16", (64, 96), bytes(12288))}, f"'{WEIGHT}': dtype BF16 is not supported; supported are I8"),
        ({"weight": ("I8", (64, 24), bytes(1536))}, f"'{WEIGHT}': shape (64, 24) differs from (64, 96), which"),
    ],
)
def test_tensors_of_other_kinds_are_refused(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    refused = pack_refusal(rewrite(tmp_path / "model", **changes))
    assert str(refused).startswith(f"model.safetensors: tensor {fault}")


def test_scales_of_two_dtypes_become_fp32(tmp_path: Path) -> None:
    tensors = packed(rewrite(tmp_path / "model", scale=scales_of(1.5, "F32")))
    dtypes = {dtype for name, (dtype, _, _) in tensors.items() if name.endswith("_scale")}
    assert dtypes == {"F32"} and tensors[SCALE][2][-4:] == struct.pack("<f", 1.5)


def test_scales_without_quantization_config_are_refused(tmp_path: Path) -> None:
    plain = config_of()
    write_folder(tmp_path / "model", plain, "BF16")
    tensors_of(CONFIG, "BF16").write(tmp_path / "model" / "model.safetensors")
    assert "dtype I8 is not supported; supported are F32, BF16, F16" in str(pack_refusal(tmp_path / "model"))


def test_packed_weights_become_int8_numbers(tmp_path: Path) -> None:
    """As compressed-tensors packs them: each number plus 128, four to an int32, with the shape beside them."""
    config = CONFIG | {"quantization_config": dict(INT8_PER_OUTPUT) | {"format": "pack-quantized"}}
    expected = tensors_of(CONFIG, "BF16")
    write_folder(tmp_path / "model", config, "BF16")
    stored = Tensors()
    for name, (dtype, shape, data) in expected.by_name.items():
        if dtype != "I8":
            stored.by_name[name] = dtype, shape, data
            continue
        words = b"".join(
            sum((byte ^ 0x80) << 8 * place for place, byte in enumerate(data[at : at + 4])).to_bytes(4, "little")
            for at in range(0, len(data), 4)
        )
        stored.by_name[f"{name}_packed"] = "I32", (shape[0], shape[1] // 4), words
        stored.by_name[f"{name}_shape"] = "I64", (2,), struct.pack("<2q", *shape)
    stored.write(tmp_path / "model" / "model.safetensors")
    assert packed(tmp_path / "model") == expected.by_name
    dtype, shape, data = stored.by_name[f"{WEIGHT}_packed"]
    stored.by_name[f"{WEIGHT}_packed"] = "I32", (shape[0] // 2, shape[1]), data[: len(data) // 2]
    stored.write(tmp_path / "model" / "model.safetensors")
    assert "shape (32, 96) differs from (64, 96), which config.json requires" in str(pack_refusal(tmp_path / "model"))
    stored.by_name[f"{WEIGHT}_packed"] = "F32", shape, data
    stored.write(tmp_path / "model" / "model.safetensors")
    assert f"'{WEIGHT}' is missing" in str(pack_refusal(tmp_path / "model"))


WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def quantized(folder: Path, engines: Sequence[str] = ()) -> Path:
    """The pack of a folder whose weights the packer quantizes."""
    path = folder.with_name(f"{folder.name}-quantized") / "draft.pack"
    path.parent.mkdir(exist_ok=True)
    pack(folder, path, 0, engines, "int8")
    return path


def quantized_refusal(folder: Path, engines: Sequence[str] = ()) -> PackRefused:
    with pytest.raises(PackRefused) as refused:
        quantized(folder, engines)
    return refused.value


def assert_pack_of(path: Path, int8: Path) -> None:
    """Checks that the pack, its manifest and config.json are those of a folder in int8."""
    expected = int8.with_suffix(".pack")
    pack(int8, expected, 0)
    for suffix in (".pack", ".manifest"):
        assert path.with_suffix(suffix).read_bytes() == expected.with_suffix(suffix).read_bytes()
    assert path.with_name("config.json").read_bytes() == (int8 / "config.json").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_pack_is_that_of_the_int8_checkpoint(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, dtype="bfloat16")
    assert_pack_of(quantized(folder), int8_checkpoint(folder))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_cross_chunks_and_blocks_are_quantized_whole(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", dtype=dtype, hidden_size=320, intermediate_size=1030)
    int8 = int8_checkpoint(folder)
    for num_values in (100, 3000):  # less than a row, and some rows
        monkeypatch.setattr(pack_writer, "BLOCK_VALUES", num_values)
        path = quantized(folder)
        manifest = decode_manifest(path.with_suffix(".manifest").read_bytes())
        weights = [entry for entry in manifest.tensors if entry.dtype == "I8"]
        starts = range(0, manifest.num_bytes, manifest.chunk_bytes)
        crossed = [
            (start - entry.offset) % entry.shape[1]
            for entry in weights
            for start in starts
            if entry.offset < start < entry.offset + entry.num_bytes
        ]
        assert any(crossed)
        assert_pack_of(path, int8)


def test_shards_are_quantized(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3-moe", dtype="bfloat16")
    int8, tensors = int8_checkpoint(folder), load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    shards = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / shard)
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_pack_of(quantized(folder), int8)


def test_text_part_of_a_multimodal_checkpoint_is_quantized(tmp_path: Path) -> None:
    folder = make_multimodal_checkpoint(tmp_path / "model", next(iter(MULTIMODAL)))
    assert_pack_of(quantized(folder), int8_checkpoint(folder))


def test_checkpoint_of_embeddings_is_quantized(tmp_path: Path) -> None:
    folder = make_headless(declare_embeddings(make_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16")))
    assert_pack_of(quantized(folder), int8_checkpoint(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantized_weights_are_within_half_a_step(tmp_path: Path, dtype: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", dtype=dtype)
    before = load_file(folder / WEIGHTS)
    before[Q_PROJ][3] = 0
    save_file(before, folder / WEIGHTS, {"format": "pt"})
    path = quantized(folder)
    data, manifest = path.read_bytes(), decode_manifest(path.with_suffix(".manifest").read_bytes())
    packed = {entry.name: data[entry.offset : entry.offset + entry.num_bytes] for entry in manifest.tensors}
    scales = {name for name in packed if name.endswith("_scale")}
    assert scales == {f"{name}_scale" for name in before if "_proj." in name}
    for name, tensor in before.items():
        if f"{name}_scale" not in scales:
            assert packed[name] == tensor.contiguous().view(torch.uint8).numpy().tobytes()
            continue
        scale = np.frombuffer(packed[f"{name}_scale"], np.float32).astype(np.float64)[:, None]
        numbers = np.frombuffer(packed[name], np.int8).reshape(tensor.shape)
        assert scale.min() > 0 and abs(numbers).max() == 127
        assert (abs(numbers * scale - tensor.double().numpy()) / scale).max() < 0.5001


@pytest.mark.parametrize(("value", "said"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")])
def test_weights_that_are_not_finite_are_not_quantized(tmp_path: Path, value: float, said: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    tensors = load_file(folder / WEIGHTS)
    tensors[Q_PROJ][5, 7] = value
    save_file(tensors, folder / WEIGHTS)
    fault = f"element 327 is {said}; all weights must be finite numbers"
    assert str(quantized_refusal(folder)) == f"{WEIGHTS}: tensor '{Q_PROJ}': {fault}"


@pytest.mark.parametrize(
    ("name", "tensor", "fault"),
    [
        (Q_PROJ, torch.zeros(64, 64, dtype=torch.int32), "a weight of I32 and shape [64, 64] cannot be quantized"),
        (Q_PROJ, torch.zeros(64, 64, dtype=torch.int8), "a weight of I8 and shape [64, 64] cannot be quantized"),
        (Q_PROJ, torch.zeros(4096), "a weight of F32 and shape [4096] cannot be quantized"),
        (Q_PROJ, torch.zeros(64, 0), "a weight of F32 and shape [64, 0] cannot be quantized"),
        (Q_PROJ, torch.zeros(1, 262_145), "a weight of F32 and shape [1, 262145] cannot be quantized"),
        (Q_PROJ, torch.zeros(64, 32), "shape (64, 32) differs from (64, 64), which config.json requires"),
        (f"{Q_PROJ}_scale", torch.ones(64, 1), "only weights that are quantized have scales"),
    ],
)
def test_tensors_that_cannot_be_quantized_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor, fault: str
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    save_file(load_file(folder / WEIGHTS) | {name: tensor}, folder / WEIGHTS)
    assert str(quantized_refusal(folder)) == f"{WEIGHTS}: tensor '{name}': {fault}"


def test_models_that_cannot_be_quantized_are_refused_by_the_field_of_the_commit(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    refusals = {
        "already": quantized_refusal(int8_checkpoint(folder)),
        "for vLLM": quantized_refusal(quantized_checkpoint(tmp_path / "awq", "awq")[0]),
        "encoder": quantized_refusal(make_encoder(tmp_path / "encoder")),
        "engine": quantized_refusal(folder, ["vllm"]),
    }
    assert {refused.file for refused in refusals.values()} == {"quantize"}
    for kind in ("already", "for vLLM"):
        assert refusals[kind].detail == "quantization_config: the weights are quantized already"
    assert refusals["encoder"].detail.startswith("quantization_config: quantization_config {")
    engine = "only the engine torchrelay computes weights that are quantized so; this model may run with vllm"
    assert refusals["engine"].detail == engine
