"""The decoder architectures that Torchrelay serves, and the order in which their tensors lie in a pack.

Read by the packer (to validate and lay out an upload) and by the engine (to find its weights); imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedModel(ValueError):
    """The config asks for something this version cannot run; ``field`` is the key of config.json."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Architecture:
    """What tells one family from another."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES = {
    family.name: family
    for family in (
        Architecture("LlamaForCausalLM"),
        Architecture("Qwen2ForCausalLM", qkv_bias=True),
        Architecture("Qwen3ForCausalLM", qk_norm=True),
    )
}
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency-dependent interpolation (the only scaling supported)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of config.json that shape the computation."""

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool

    @property
    def num_segments(self) -> int:
        return self.num_layers + 2


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor the architecture needs. The tensors of one ``group`` lie next to each other."""

    name: str
    shape: tuple[int, ...]
    group: str


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Checks config.json and takes out what shapes the model. Raises ``UnsupportedModel``."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}", "architectures"
        )
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    parsed = ModelConfig(
        architecture=ARCHITECTURES[name],
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_whole(config, "num_key_value_heads", heads),
        head_dim=_whole(config, "head_dim", hidden // heads),
        vocab_size=_whole(config, "vocab_size"),
        max_context_tokens=_whole(config, "max_position_embeddings"),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(config),
        rope_scaling=_rope_scaling(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    _refuse_unsupported(config, parsed)
    return parsed


def _refuse_unsupported(config: Mapping[str, Any], parsed: ModelConfig) -> None:
    if parsed.num_heads % parsed.num_kv_heads:
        raise UnsupportedModel("num_attention_heads is not a multiple of num_key_value_heads", "num_key_value_heads")
    if parsed.head_dim % 2:
        raise UnsupportedModel("head_dim must be even for rotary embeddings", "head_dim")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(
            f"hidden_act {config['hidden_act']!r} is not supported; supported is 'silu'", "hidden_act"
        )
    if config.get("mlp_bias"):
        raise UnsupportedModel("biases in the MLP are not supported", "mlp_bias")
    if config.get("attention_bias") and not parsed.architecture.qkv_bias:
        raise UnsupportedModel("attention biases are not supported for this architecture", "attention_bias")
    if config.get("use_sliding_window") and parsed.architecture.name != "LlamaForCausalLM":
        raise UnsupportedModel("sliding-window attention is not supported", "use_sliding_window")
    if config.get("quantization_config"):
        raise UnsupportedModel("quantised weights are not supported", "quantization_config")


def tensors_by_segment(config: ModelConfig) -> Iterator[tuple[TensorSlot, ...]]:
    """The tensors of segment 0, 1, ... in the order they lie in the pack."""
    yield (TensorSlot("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), "embed"),)
    for layer in range(config.num_layers):
        yield tuple(_layer_tensors(config, f"model.layers.{layer}."))
    norm = TensorSlot("model.norm.weight", (config.hidden_size,), "norm")
    head = TensorSlot("lm_head.weight", (config.vocab_size, config.hidden_size), "head")
    yield (norm,) if config.tied_embeddings else (norm, head)


def _layer_tensors(config: ModelConfig, prefix: str) -> Iterator[TensorSlot]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield TensorSlot(f"{prefix}input_layernorm.weight", (hidden,), "input_norm")
    yield TensorSlot(f"{prefix}post_attention_layernorm.weight", (hidden,), "post_norm")
    if config.architecture.qk_norm:
        yield TensorSlot(f"{prefix}self_attn.q_norm.weight", (config.head_dim,), "q_norm")
        yield TensorSlot(f"{prefix}self_attn.k_norm.weight", (config.head_dim,), "k_norm")
    for letter, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        yield TensorSlot(f"{prefix}self_attn.{letter}_proj.weight", (size, hidden), "qkv")
    if config.architecture.qkv_bias:
        for letter, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            yield TensorSlot(f"{prefix}self_attn.{letter}_proj.bias", (size,), "qkv_bias")
    yield TensorSlot(f"{prefix}self_attn.o_proj.weight", (hidden, q_size), "o")
    for part in ("gate", "up"):
        yield TensorSlot(f"{prefix}mlp.{part}_proj.weight", (inner, hidden), "gate_up")
    yield TensorSlot(f"{prefix}mlp.down_proj.weight", (hidden, inner), "down")


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
        raise UnsupportedModel(f"{key} must be a positive whole number, not {value!r}", key)
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UnsupportedModel(f"{key} must be a positive number, not {value!r}", key)
    return float(value)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UnsupportedModel("rope_scaling must be an object", "rope_scaling")
    return found


def _rope_theta(config: Mapping[str, Any]) -> float:
    return _number(
        {"rope_theta": _rope(config).get("rope_theta", config.get("rope_theta", 10000.0))}, "rope_theta", 1e4
    )


def _rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(
            f"rope scaling {kind!r} is not supported; supported are 'default' and 'llama3'", "rope_scaling"
        )
    return RopeScaling(
        factor=_number(rope, "factor", 1.0),
        low_freq_factor=_number(rope, "low_freq_factor", 1.0),
        high_freq_factor=_number(rope, "high_freq_factor", 4.0),
        original_max_position=_whole(rope, "original_max_position_embeddings"),
    )
