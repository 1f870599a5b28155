"""Checkpoints with weights in int8, and the same weights in the dtype of a reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.modelspec.text_part import text_tensor_name

WEIGHTS, SCALE = "model.safetensors", "_scale"


def int8_checkpoint(source: Path) -> Path:
    """``source``, of one file, with the weights that a commit with ``quantize`` publishes."""
    folder = source.with_name(f"{source.name}-int8")
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": dict(INT8_PER_OUTPUT)}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / WEIGHTS)
    slots = {slot.name for slots in tensors_by_segment(read_config(config)) for slot in slots if slot.dtype == "I8"}
    # As text models are named in multimodal checkpoints, and decoders in those of embeddings.
    for name in [name for name in tensors if slots & {name, f"model.{name}", text_tensor_name(name)}]:
        weights = tensors[name].float()
        scales = weights.abs().amax(dim=1, keepdim=True) / 127
        scales[scales == 0] = 1
        tensors |= {name: (weights / scales).round().to(torch.int8), name + SCALE: scales}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
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
