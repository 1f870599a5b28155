"""The linear layers that vLLM leaves in the model's dtype, as the quantization_config that it receives lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torchrelay.modelspec.vllm_quantization import FIELD

_HEAD: Final = "lm_head"
_LISTS: Final[Mapping[str, tuple[str, ...]]] = {  # the first that is not empty counts
    "awq": ("modules_to_not_convert",),
    "gptq": (),
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "compressed-tensors": ("ignore",),
}
_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def fused_name(layer: str) -> str:
    """The layer of vLLM that holds this one: it fuses the inputs of attention, those of an MLP, and all experts."""
    before, of_experts, _ = layer.partition(".experts.")
    if of_experts:
        return f"{before}.experts"
    before, dot, last = layer.rpartition(".")
    return before + dot + _FUSED.get(last, last)


class PlainLayers:
    """Follows vLLM: AWQ lists parts of names, FP8 whole names, compressed-tensors whole names and patterns."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """``document`` is checked: its patterns are those of ``vllm_quantization``."""
        self._method = document["quant_method"]
        keys = _LISTS[self._method]
        self._key = next((key for key in keys if document[key]), "".join(keys[:1]))
        entries = document[self._key] if self._key else []
        self._names = {entry for entry in entries if not entry.startswith("re:")}
        self._patterns = [_linear(entry.removeprefix("re:")) for entry in entries if entry.startswith("re:")]
        self._has_head = bool(document.get("lm_head"))

    def field(self, layer: str) -> str:
        """The field that says whether the layer is quantized."""
        return f"{FIELD}.{self._key}" if self._key and layer != _HEAD else FIELD

    def has(self, layer: str) -> bool:
        """Whether vLLM leaves the layer plain, by its name in the checkpoint. The head only GPTQ can quantize."""
        if layer == _HEAD:
            return not self._has_head
        fused = fused_name(layer)
        is_expert = fused.endswith(".experts")
        if self._method == "awq":
            return any(entry in fused or (entry in layer and not is_expert) for entry in self._names)
        if self._method == "fp8" and is_expert:
            return any(fused in entry for entry in self._names)
        names = layer, fused
        return any(name in self._names or any(each.match(name) for each in self._patterns) for name in names)


def _linear(pattern: str) -> re.Pattern[str]:
    """The same pattern, which ends soon: all ".*" but the last skip to the first place where what follows them fits.

    NOTE: what stands between two ".*" has a fixed length, so that a later place would match nothing more.
    """
    first, *others = pattern.split(".*")
    skips = "".join(f"(?>.*?{part})" for part in others[:-1])
    return re.compile(first + skips + "".join(f".*{part}" for part in others[-1:]))
