"""Small checkpoints in the formats of AWQ, GPTQ, FP8 and compressed-tensors, each with the model of its numbers.

The weights are rounded to the nearest, without the calibration of a real quantizer.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import make_checkpoint

GROUP = 32
_LINEAR = re.compile(r"model\.layers\..*_proj\.weight")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """``tensors_of`` gives the tensors of a weight, by the ends of their names, and the weight that they mean."""

    config: Mapping[str, Any]
    tensors_of: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def quantized_checkpoint(folder: Path, name: str, *, dtype: str = "float16", **config: Any) -> tuple[Path, Path]:
    """Writes a llama in a format of ``FORMATS``; returns its folder, and that of the same model in fp32."""
    from safetensors.torch import load_file, save_file

    source = make_checkpoint(folder / "source", "llama", dtype=dtype, head_dim=32, **config)
    stored, meant, form = Tensors(), Tensors(), FORMATS[name]
    for key, weight in load_file(source / "model.safetensors").items():
        if _LINEAR.fullmatch(key):
            tensors, value = form.tensors_of(weight.float())
            scale_dtype = torch.float32 if "fp8" in name else weight.dtype
            for end, tensor in tensors.items():
                is_scale = tensor.dtype == torch.float32
                stored[key.removesuffix("weight") + end] = (tensor.to(scale_dtype) if is_scale else tensor).contiguous()
        else:
            stored[key], value = weight, weight.float()
        meant[key] = value.contiguous()
    document = json.loads((source / "config.json").read_text())
    folders = folder / name, folder / f"{name}-fp32"
    for target, tensors, changes in (
        (folders[0], stored, {"quantization_config": dict(form.config)}),
        (folders[1], meant, {"dtype": "float32"}),
    ):
        shutil.copytree(source, target)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        (target / "config.json").write_text(json.dumps(document | changes))
    return folders


def _groups(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(weight.shape[0], -1, GROUP)


def _half(scales: torch.Tensor) -> torch.Tensor:
    """Scales that F16 and BF16 hold."""
    return scales.to(torch.bfloat16).to(torch.float16).float()


def _symmetric(weight: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [out, in] from -levels - 1 to levels, scales [out, groups], and the weight that they mean."""
    groups = _groups(weight)
    scales = _half(groups.abs().amax(-1) / levels)
    numbers = (groups / scales[..., None]).round().clamp(-levels - 1, levels)
    return numbers.flatten(1).int(), scales, (numbers * scales[..., None]).flatten(1)


def _packed(numbers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Numbers of ``bits`` in int32, the first of them in the lowest bits, along the last dimension."""
    parts = numbers.long().reshape(*numbers.shape[:-1], -1, 32 // bits)
    words = (parts << (bits * torch.arange(32 // bits))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, meant = _symmetric(weight, 7)
    num_out, num_in = weight.shape
    return {
        "qweight": _packed(numbers + 8).t(),
        "qzeros": _packed(torch.full((num_in // GROUP, num_out), 7)),  # one less, as GPTQ stores them
        "scales": scales.t(),
        "g_idx": torch.arange(num_in, dtype=torch.int32) // GROUP,
    }, meant


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = _groups(weight)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = _half((high - low) / 15)
    zeros = (-low / scales).round().clamp(0, 15)
    numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)

    def interleaved(values: torch.Tensor) -> torch.Tensor:
        return _packed(values.reshape(values.shape[0], -1, 8)[..., _AWQ_ORDER].flatten(-2))

    return {
        "qweight": interleaved(numbers.flatten(1).t()),
        "qzeros": interleaved(zeros.t()),
        "scales": scales.t(),
    }, ((numbers - zeros[..., None]) * scales[..., None]).flatten(1)


def _pack_quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, meant = _symmetric(weight, 7)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": _packed(numbers + 8), "weight_scale": scales, "weight_shape": shape}, meant


def _w8a8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = _half(weight.abs().amax(-1, keepdim=True) / 127)
    numbers = (weight / scales).round().clamp(-127, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales


def _fp8_channels(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(-1, keepdim=True) / 448
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def _fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def _fp8_block(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    wide = torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            scales[row, column] = wide[part] = weight[part].abs().amax() / 448
    numbers = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * wide


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_FP8_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "gptq": Format({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}, _gptq),
    "w4a16": Format(_compressed("pack-quantized", _INT4, None), _pack_quantized),
    "w8a8": Format(_compressed("int-quantized", _INT8, _INT8_TOKENS), _w8a8),
    "fp8-channels": Format(_compressed("float-quantized", _FP8, _FP8_TOKENS), _fp8_channels),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8_tensor),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, _fp8_block
    ),
}
