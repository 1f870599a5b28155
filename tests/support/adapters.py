"""Random LoRA adapters in PEFT's format, and the model that PEFT makes of a base and an adapter."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_PREFIX = "base_model.model."


def make_adapter(
    folder: Path,
    model: Any,
    *,
    targets: tuple[str, ...] = ALL,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Writes adapter_config.json and adapter_model.safetensors for a model of transformers, with effects as large as
    the base's own. ``settings`` override fields of the config; ``rank_pattern`` also the shapes.
    """
    document: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        **settings,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear):
            of_module = _pattern(document.get("rank_pattern") or {}, name, rank)
            a = torch.randn(of_module, module.in_features, generator=generator) / math.sqrt(module.in_features)
            b = torch.randn(module.out_features, of_module, generator=generator) / 8
            tensors |= {f"{_PREFIX}{name}.lora_A.weight": a.to(dtype), f"{_PREFIX}{name}.lora_B.weight": b.to(dtype)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def with_adapter(model: Any, folder: Path) -> Any:
    """A copy of the model whose projections compute as PEFT's ``lora.Linear.forward`` (0.17) does:
    ``result + lora_B(lora_A(x)) * scaling``, with the adapter in fp32.
    """
    adapted, tensors = deepcopy(model), load_file(folder / "adapter_model.safetensors")
    document = json.loads((folder / "adapter_config.json").read_text())
    for name, module in list(adapted.named_modules()):
        a = tensors.get(f"{_PREFIX}{name}.lora_A.weight")
        if a is not None:
            rank = _pattern(document.get("rank_pattern") or {}, name, document["r"])
            alpha = _pattern(document.get("alpha_pattern") or {}, name, document["lora_alpha"])
            scaling = alpha / (math.sqrt(rank) if document["use_rslora"] else rank)
            b = tensors[f"{_PREFIX}{name}.lora_B.weight"]
            parent, _, own = name.rpartition(".")
            setattr(adapted.get_submodule(parent), own, _Adapted(module, a.float(), b.float(), scaling))
    return adapted


class _Adapted(torch.nn.Module):
    def __init__(self, base: torch.nn.Module, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scaling = base, a, b, scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        low = torch.nn.functional.linear(x.to(self.a.dtype), self.a)
        return (result + torch.nn.functional.linear(low, self.b) * self.scaling).to(result.dtype)


def _pattern(pattern: dict[str, Any], name: str, default: Any) -> Any:
    """As PEFT's ``get_pattern_key``."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), default)
