"""The footprint of a model: bytes of weights and of KV, and the arithmetic of a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torchrelay.modelspec.config import ModelConfig, declared_dtype, read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.opaque import read_opaque
from torchrelay.modelspec.tensor_order import DTYPE_BYTES

_DEFAULT_DTYPE: Final = "BF16"
_SCALE_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Footprint:
    """The amounts that determine memory and time. A mixture of experts reads few experts for few tokens."""

    weights_bytes: float
    shared_bytes: float  # of the weights that every step reads
    expert_bytes: float  # of all routed experts
    expert_share: float  # of them, for one token
    flops_per_token: float  # of linear layers
    flops_per_attended: float  # of attention, for each position that a token attends to
    kv_bytes_per_token: float
    max_context_tokens: int
    windowed_share: float = 0.0  # of the layers: they attend to ``window`` positions at most
    window: int = 0
    has_8bit_activations: bool = False

    def read_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a step of ``num_tokens`` reads: an expert is read once if any token chooses it."""
        chosen = 1.0 - (1.0 - self.expert_share) ** num_tokens
        return self.shared_bytes + self.expert_bytes * float(chosen)

    def attended(self, context: float) -> float:
        """Positions that a token after ``context`` positions attends to, in the mean of the layers."""
        return context - self.windowed_share * max(context - self.window, 0.0)


def footprint_of(config: Mapping[str, Any], weights_bytes: int = 0, *, to_int8: bool = False) -> Footprint:
    """The footprint of a config.json. ``weights_bytes``: of its files, where they are known, which replace the sum of
    the shapes. ``to_int8``: the linear layers are to be quantized.

    Raises ``UnsupportedModel``, also for a model whose shapes are not known here without ``weights_bytes``.
    """
    dtype = declared_dtype(config) or _DEFAULT_DTYPE
    try:
        parsed = read_config(config)
    except UnsupportedModel as error:
        if to_int8 or not weights_bytes or error.field != "architectures":
            raise
        shape = read_opaque(config)
        kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[dtype]
        return footprint_of_bytes(weights_bytes, DTYPE_BYTES[dtype], kv, shape.max_context_tokens)
    if to_int8 and (parsed.int8 or parsed.vllm):
        raise UnsupportedModel("the weights are quantized already", "quantization_config")
    return _footprint(parsed, dtype, weights_bytes, to_int8)


def footprint_of_bytes(weights_bytes: float, dtype_bytes: float, kv_bytes_per_token: float, context: int) -> Footprint:
    """The footprint of a dense model of which only sizes are known; attention's arithmetic is left out."""
    return Footprint(
        weights_bytes, weights_bytes, 0.0, 0.0, 2 * weights_bytes / dtype_bytes, 0.0, kv_bytes_per_token, context
    )


def _footprint(config: ModelConfig, dtype: str, weights_bytes: int, to_int8: bool) -> Footprint:
    dense, routed, chosen = _layer_numbers(config)
    table = config.vocab_size * config.hidden_size
    head = table if config.has_head else 0
    has_own_head = config.has_head and not config.tied_embeddings
    wide = DTYPE_BYTES[dtype]
    is_int8 = to_int8 or config.int8 is not None
    # An output has a scale; layers have thousands of inputs, so that scales are a thousandth of the bytes.
    linear = 1 + _SCALE_BYTES / config.hidden_size if is_int8 else wide
    if config.vllm is not None and weights_bytes:
        linear = max(weights_bytes - wide * (table + has_own_head * table), 0) / (dense + routed)
    expert_bytes, shared_bytes = routed * linear, dense * linear + head * wide
    held = dense * linear + expert_bytes + wide * (table + has_own_head * table)
    if weights_bytes and not to_int8 and not config.vllm:
        held = float(weights_bytes)
    windows = [window for window in config.windows if window is not None]
    return Footprint(
        weights_bytes=held,
        shared_bytes=shared_bytes,
        expert_bytes=expert_bytes,
        expert_share=config.experts.per_token / config.experts.count if config.experts else 0.0,
        flops_per_token=2.0 * (dense + chosen + head),
        flops_per_attended=4.0 * config.num_layers * config.num_heads * config.head_dim,
        kv_bytes_per_token=2.0 * config.num_layers * config.num_kv_heads * config.head_dim * wide,
        max_context_tokens=config.max_context_tokens,
        windowed_share=len(windows) / config.num_layers,
        window=max(windows, default=0),
        has_8bit_activations=config.vllm is not None and config.vllm.stored == "F8_E4M3",
    )


def _layer_numbers(config: ModelConfig) -> tuple[int, int, int]:
    """The numbers in linear layers: those that every token computes, all routed experts', and a token's experts'."""
    hidden = config.hidden_size
    attention = hidden * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    if config.encoder is not None:  # all its heads have keys and values
        attention = 4 * hidden * hidden
    mlp = (2 if config.encoder is not None else 3) * hidden * config.intermediate_size
    experts = config.experts
    if experts is None:
        return config.num_layers * (attention + mlp), 0, 0
    num_sparse = config.num_layers - len(experts.dense_layers)
    routers = num_sparse * (experts.count * hidden + 3 * hidden * experts.shared_size)
    each = num_sparse * 3 * hidden * experts.intermediate_size
    dense = config.num_layers * attention + len(experts.dense_layers) * mlp + routers
    return dense, each * experts.count, each * experts.per_token
