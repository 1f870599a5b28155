"""Faulty uploads are refused, with the file and the fault."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

import pytest

from tests.unit.param_store.faulty_folders import FAULTS, SHARD_FAULTS, WEIGHTS, Fault, raw_header
from tests.unit.param_store.model_folders import (
    Tensors,
    config_of,
    pack_refusal,
    tensors_of,
    write_folder,
    write_shards,
)
from torchrelay.modelspec.tensor_order import DTYPE_BYTES
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.packer.finite_values import first_not_finite


@pytest.mark.parametrize("fault", [*FAULTS, *SHARD_FAULTS], ids=itemgetter(0))
def test_faults_are_refused_by_file_and_cause(tmp_path: Path, fault: Fault) -> None:
    _, change, file, detail = fault
    folder = tmp_path / "model"
    if fault in SHARD_FAULTS:
        write_shards(folder)
    else:
        write_folder(folder)
    change(folder)
    refused = pack_refusal(folder)
    assert refused.file == file and detail in refused.detail
    assert not (tmp_path / "refused.pack").exists()


SPECIAL_VALUES = {  # the bits of NaNs, quiet and signalling, and of both infinities
    "F32": (0x7FC00000, 0xFF800001, 0x7F800000, 0xFF800000),
    "BF16": (0x7FC0, 0xFF81, 0x7F80, 0xFF80),
    "F16": (0x7E00, 0xFC01, 0x7C00, 0xFC00),
}


@pytest.mark.parametrize("dtype", SPECIAL_VALUES)
def test_nonfinite_weights_refused_by_tensor_and_element(tmp_path: Path, dtype: str) -> None:
    config = config_of(hidden_size=128, intermediate_size=1024)
    folder = write_folder(tmp_path / "model", config, dtype)
    tensors = tensors_of(config, dtype)
    names = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")
    for name, bits, where in zip(names * 2, SPECIAL_VALUES[dtype], (0.0, 0.7, 1.0, 0.3), strict=False):
        kind, shape, data = tensors.by_name[name]
        size = DTYPE_BYTES[dtype]
        index = int(where * (len(data) // size - 1))
        spoilt = data[: index * size] + bits.to_bytes(size, "little") + data[(index + 1) * size :]
        Tensors({**tensors.by_name, name: (kind, shape, spoilt)}).write(folder / WEIGHTS)
        what = "infinite" if bits in SPECIAL_VALUES[dtype][2:] else "NaN"
        detail = f"tensor '{name}': element {index:,} is {what}; all weights must be finite numbers"
        assert str(pack_refusal(folder)) == f"{WEIGHTS}: {detail}"
    tensors.write(folder / WEIGHTS)
    pack(folder, tmp_path / "a.pack", 0)


def test_weights_beyond_the_dtype_of_the_pack_refused(tmp_path: Path) -> None:
    """65,520 is the least number that rounds to infinity in fp16; a NaN stays one, whatever its bits."""
    folder = write_folder(tmp_path / "model", dtype="F16")
    tensors = tensors_of(config_of(), "F16")
    faults = {0x477FE000 + 0xFFF: None, 0x477FF000: "infinite in F16", 0x7FFFFFFF: "NaN", 0xFF800000: "infinite"}
    for bits, fault in faults.items():
        numbers = bytes(4 * 5) + bits.to_bytes(4, "little") + bytes(4 * 58)
        tensors.by_name["model.norm.weight"] = ("F32", (64,), numbers)
        tensors.write(folder / WEIGHTS)
        if fault is None:
            pack(folder, tmp_path / "a.pack", 0)
            continue
        detail = f"tensor 'model.norm.weight': element 5 is {fault}; all weights must be finite numbers"
        assert str(pack_refusal(folder)) == f"{WEIGHTS}: {detail}"


@pytest.mark.parametrize("dtype", SPECIAL_VALUES)
def test_extreme_finite_weights_accepted(dtype: str) -> None:
    bits = 8 * DTYPE_BYTES[dtype]
    largest = SPECIAL_VALUES[dtype][2] - 1
    values = [0, 1, largest, 1 << (bits - 1), (1 << (bits - 1)) + largest] * 40_000
    data = b"".join(value.to_bytes(bits // 8, "little") for value in values)
    assert first_not_finite(memoryview(data), dtype) is None
    for place in (0, 65_535, 65_536, len(values)):
        spoilt = data[: place * bits // 8] + SPECIAL_VALUES[dtype][1].to_bytes(bits // 8, "little")
        assert first_not_finite(memoryview(spoilt + data), dtype) == (place, "NaN")


def test_duplicate_key_among_many_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    keys = [f'"{number}":0' for number in range(200_000)]
    raw_header(f"{{{','.join([*keys, keys[-1]])}}}".encode())(folder)
    assert "'199999' appears twice" in pack_refusal(folder).detail  # a search per key would take minutes
