"""Packs of int8 weights: the upload's bytes and scales as they are; hostile scales are refused by file and tensor."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from tests.unit.param_store.model_folders import Tensors, config_of, pack_refusal, tensors_of, write_folder
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT
from torchrelay.param_store.packer.__main__ import pack
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
