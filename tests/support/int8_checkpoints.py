"""Checkpoints with weights in int8, and the same weights in the dtype of a reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from torchrelay.cli.api.int8_folder import write_int8_folder

WEIGHTS, SCALE = "model.safetensors", "_scale"


def int8_checkpoint(source: Path) -> Path:
    """``source`` as `torchrelay upload --quantize int8` sends it."""
    folder = source.with_name(f"{source.name}-int8")
    folder.mkdir()
    write_int8_folder(source, folder, lambda *_: None)
    return folder


def dequantized_checkpoint(source: Path, int8: Path, dtype: torch.dtype) -> Path:
    """``source`` with the weights of its int8 form, as numbers of ``dtype``."""
    folder = source.with_name(f"{source.name}-dequantized")
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    stored = load_file(int8 / WEIGHTS)
    weights = {name: tensor for name, tensor in stored.items() if not name.endswith(SCALE)}
    for name, tensor in weights.items():
        if tensor.dtype == torch.int8:
            weights[name] = tensor.double() * stored[name + SCALE].double()
    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder
