"""The model loader that vLLM finds under the load format ``torchrelay``."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from torchrelay.engine.core import LoadFailed
from torchrelay.vllm.arriving_pack import ArrivingPack

LOAD_FORMAT = "torchrelay"


@register_model_loader(LOAD_FORMAT)
class PackLoader(BaseModelLoader):
    """Copies each tensor from the host's arena into vLLM's parameters as soon as it has arrived."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing: the bytes are on their way into the arena."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        pack = self.load_config.model_loader_extra_config["pack"]
        assert isinstance(pack, ArrivingPack)
        vllm_model: Any = model  # every model of vLLM has load_weights
        loaded = vllm_model.load_weights(pack.tensors())
        if loaded is not None:  # a model of vLLM may return none
            _check_all_loaded(model, loaded)


def _check_all_loaded(model: nn.Module, loaded: Container[str]) -> None:
    """Raises ``LoadFailed`` for a parameter that no tensor was copied to: its memory would have any old numbers."""
    have_defaults = {
        id(parameter)
        for module in model.modules()
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():  # of tied ones the first
        if name not in loaded and parameter.numel() and id(parameter) not in have_defaults:
            raise LoadFailed(f"the pack has no tensor for {name!r}, which vLLM needs")
