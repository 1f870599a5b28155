"""Folders with weights in int8: the nearest numbers, the same bytes each time, and refusals by file and tensor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint
from torchrelay.cli.api.int8_folder import write_int8_folder
from torchrelay.cli.api.model_check import check_folder
from torchrelay.cli.api.model_folder import model_files
from torchrelay.cli.errors import CliError
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def int8_of(source: Path, folder: Path) -> Path:
    folder.mkdir()
    write_int8_folder(source, folder, lambda *_: None)
    check_folder(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_within_half_a_step(tmp_path: Path, dtype: str) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", dtype=dtype)
    weights = load_file(source / WEIGHTS)
    weights[Q_PROJ][3] = 0
    save_file(weights, source / WEIGHTS, {"format": "pt"})
    before = load_file(source / WEIGHTS)
    after = load_file(int8_of(source, tmp_path / "int8") / WEIGHTS)
    scales = {name for name in after if name.endswith("_scale")}
    assert set(after) - scales == set(before)
    assert scales == {f"{name}_scale" for name in before if "_proj." in name}
    for name, tensor in before.items():
        if f"{name}_scale" not in scales:
            assert torch.equal(after[name], tensor)
            continue
        scale = after[f"{name}_scale"]
        assert scale.shape == (len(tensor), 1) and float(scale.min()) > 0
        step = (after[name].double() * scale - tensor.double()).abs() / scale
        assert float(step.max()) < 0.5001
        assert int(after[name].abs().amax()) == 127


def test_shards_keep_their_names_and_other_files(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3-moe", dtype="bfloat16")
    weights = load_file(source / WEIGHTS)
    (source / WEIGHTS).unlink()
    shards = {"a.safetensors": sorted(weights)[::2], "b.safetensors": sorted(weights)[1::2]}
    for shard, names in shards.items():
        save_file({name: weights[name] for name in names}, source / shard)
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = int8_of(source, tmp_path / "int8")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in shards:
        assert set(load_file(folder / shard)) == {name for name, file in weight_map.items() if file == shard}
    assert {name: weight_map[name] for name in weights} == index["weight_map"]
    assert "model.layers.0.mlp.gate.weight_scale" not in weight_map
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config") == INT8_PER_OUTPUT
    assert config == json.loads((source / "config.json").read_text())
    again = int8_of(source, tmp_path / "again")
    files = model_files(again, lambda *_: None)
    assert files == model_files(folder, lambda *_: None)
    assert {file.path for file in files} == {file.path for file in model_files(source, lambda *_: None)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", dtype="bfloat16")
    weights = load_file(source / WEIGHTS)
    weights[Q_PROJ][5, 7] = value
    save_file(weights, source / WEIGHTS)
    with pytest.raises(CliError, match=f"{WEIGHTS}: {Q_PROJ}: some of its values are not finite"):
        int8_of(source, tmp_path / "int8")


def test_quantized_and_unsupported_models_are_refused_by_field(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama")
    folder = int8_of(source, tmp_path / "int8")
    with pytest.raises(CliError, match=r"config\.json: quantization_config: the weights are quantized already"):
        int8_of(folder, tmp_path / "twice")
    weights = load_file(source / WEIGHTS)
    save_file(weights | {Q_PROJ: weights[Q_PROJ].to(torch.int32)}, source / WEIGHTS)
    with pytest.raises(CliError, match=rf"{Q_PROJ}: a weight of I32 and shape \[64, 64\] cannot be quantized"):
        int8_of(source, tmp_path / "integers")
