"""config.json, read exactly or refused by field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrelay.transfer.architectures import ARCHITECTURES, Architecture

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
MAX_LAYERS, MAX_EXPERTS = 4096, 4096  # so that a config alone cannot make its reader's memory grow
MAX_HEAD_DIM = 1024  # kernels keep a few heads on their stack
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_FIRST_WINDOWED = 28  # transformers' default of max_window_layers


class UnsupportedModel(ValueError):
    """The config asks for something this version cannot run; ``field`` is the key of config.json."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency-dependent interpolation."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: the base, and how they are stretched for longer contexts."""

    theta: float
    scaling: RopeScaling | None = None
    linear_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A mixture of experts in place of each layer's MLP."""

    count: int
    per_token: int
    intermediate_size: int
    sums_to_one: bool


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
    activation: str  # one of ACTIVATIONS
    rope: RopeConfig
    local_rope: RopeConfig | None  # of layers with a window; None: the same
    windows: tuple[int | None, ...]  # per layer: how many positions it sees, its own included; None: all
    query_scale: float  # scores are multiplied by it
    score_cap: float | None
    logit_cap: float | None
    experts: ExpertConfig | None
    tied_embeddings: bool

    @property
    def num_segments(self) -> int:
        return self.num_layers + 2


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Checks config.json and takes out what shapes the model. Raises ``UnsupportedModel``."""
    family = _family(config)
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    head_dim = _whole(config, "head_dim", family.head_dim or hidden // heads, at_most=MAX_HEAD_DIM)
    num_layers = _whole(config, "num_hidden_layers", at_most=MAX_LAYERS)
    score_cap, logit_cap = _soft_caps(config, family)
    parsed = ModelConfig(
        architecture=family,
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_whole(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=_whole(config, "vocab_size"),
        max_context_tokens=_whole(config, "max_position_embeddings"),
        norm_eps=_number(config, "rms_norm_eps", family.norm_eps),
        activation=_activation(config, family),
        rope=_rope(config, family, _FULL),
        local_rope=_rope(config, family, _WINDOWED) if family.local_rope else None,
        windows=_windows(config, family, num_layers),
        query_scale=_query_scalar(config, family, head_dim) ** -0.5,
        score_cap=score_cap,
        logit_cap=logit_cap,
        experts=_experts(config, family),
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied_embeddings)),
    )
    _refuse_unsupported(config, parsed)
    return parsed


def _family(config: Mapping[str, Any]) -> Architecture:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}", "architectures"
        )
    return ARCHITECTURES[name]


def _refuse_unsupported(config: Mapping[str, Any], parsed: ModelConfig) -> None:
    if parsed.num_heads % parsed.num_kv_heads:
        raise UnsupportedModel("num_attention_heads is not a multiple of num_key_value_heads", "num_key_value_heads")
    if parsed.head_dim % 2:
        raise UnsupportedModel("head_dim must be even for rotary embeddings", "head_dim")
    if config.get("mlp_bias"):
        raise UnsupportedModel("biases in the MLP are not supported", "mlp_bias")
    if config.get("attention_bias") and not parsed.architecture.qkv_bias:
        raise UnsupportedModel("attention biases are not supported for this architecture", "attention_bias")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("attention that looks ahead is not supported", "use_bidirectional_attention")
    if config.get("quantization_config"):
        raise UnsupportedModel("quantised weights are not supported", "quantization_config")


def _activation(config: Mapping[str, Any], family: Architecture) -> str:
    name = config.get(family.activation_key) or family.activation
    if name not in ACTIVATIONS:
        key, known = family.activation_key, ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{key} {name!r} is not supported; supported are {known}", key)
    return str(name)


def _soft_caps(config: Mapping[str, Any], family: Architecture) -> tuple[float | None, float | None]:
    if family.soft_caps is None:
        return None, None
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    found = [config.get(key, default) for key, default in zip(keys, family.soft_caps, strict=True)]
    score_cap, logit_cap = (
        None if value is None else _number({key: value}, key, 1.0) for key, value in zip(keys, found, strict=True)
    )
    return score_cap, logit_cap


def _query_scalar(config: Mapping[str, Any], family: Architecture, head_dim: int) -> float:
    if family.query_scalar is None:
        return float(head_dim)
    return _number(config, "query_pre_attn_scalar", float(family.query_scalar))


def _windows(config: Mapping[str, Any], family: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """Which layers see only the last positions, by the rules that each family has for it."""
    full: tuple[int | None, ...] = (None,) * num_layers
    if family.windows == "never" or (family.window_switch and not config.get(family.window_switch)):
        return full
    found = config.get("sliding_window", family.window)
    if found is None and not family.full_every:
        return full
    window = _whole({"sliding_window": found}, "sliding_window")
    if family.windows == "every_layer":
        return (window,) * num_layers
    types = config.get("layer_types")
    if types is None and family.full_every:
        every = _whole(config, "sliding_window_pattern", family.full_every)
        types = [_WINDOWED if (layer + 1) % every else _FULL for layer in range(num_layers)]
    elif types is None:
        first = config.get("max_window_layers", _FIRST_WINDOWED)
        if type(first) is not int:
            raise UnsupportedModel(f"max_window_layers must be a whole number, not {first!r}", "max_window_layers")
        types = [_WINDOWED if layer >= first else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (_WINDOWED, _FULL) for kind in types):
        raise UnsupportedModel(f"layer_types must name {_WINDOWED} or {_FULL} for each layer", "layer_types")
    return tuple(window if kind == _WINDOWED else None for kind in types)


def _experts(config: Mapping[str, Any], family: Architecture) -> ExpertConfig | None:
    names = family.experts
    if names is None:
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModel("layers without experts among layers with them are not supported", "mlp_only_layers")
    count_key = next((key for key in names.count_keys if key in config), names.count_keys[0])
    count = _whole(config, count_key, at_most=MAX_EXPERTS)
    per_token = _whole(config, "num_experts_per_tok", names.per_token)
    if per_token > count:
        raise UnsupportedModel(f"num_experts_per_tok is more than {count_key}", "num_experts_per_tok")
    sums_to_one = bool(config.get(names.sums_to_one_key)) if names.sums_to_one_key else True
    return ExpertConfig(count, per_token, _whole(config, names.size_key), sums_to_one)


def _rope(config: Mapping[str, Any], family: Architecture, layer_type: str) -> RopeConfig:
    """transformers 5 writes rope_parameters, by layer type where they differ; earlier ones keys of their own."""
    found = config.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise UnsupportedModel("rope_parameters must be an object", "rope_parameters")
    if family.local_rope and found and layer_type not in found:
        raise UnsupportedModel(f"rope_parameters must have those of {layer_type}", "rope_parameters")
    found = found.get(layer_type, found)
    if layer_type == _WINDOWED and not config.get("rope_parameters"):
        return RopeConfig(_number(config, "rope_local_base_freq", 10_000.0))
    found = found or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UnsupportedModel("rope_scaling must be an object", "rope_scaling")
    default = _number(config, "rope_theta", family.rope_theta if layer_type == _FULL else 10_000.0)
    if found.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise UnsupportedModel("rotary embeddings of a part of each head are not supported", "partial_rotary_factor")
    return _scaled_rope(found, _number(found, "rope_theta", default))


def _scaled_rope(rope: Mapping[str, Any], theta: float) -> RopeConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=_number(rope, "factor", 1.0))
    if kind != "llama3":
        raise UnsupportedModel(
            f"rope scaling {kind!r} is not supported; supported are 'default', 'linear' and 'llama3'", "rope_scaling"
        )
    scaling = RopeScaling(
        factor=_number(rope, "factor", 1.0),
        low_freq_factor=_number(rope, "low_freq_factor", 1.0),
        high_freq_factor=_number(rope, "high_freq_factor", 4.0),
        original_max_position=_whole(rope, "original_max_position_embeddings"),
    )
    return RopeConfig(theta, scaling)


def _whole(config: Mapping[str, Any], key: str, default: int | None = None, at_most: int = 2**63 - 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{key} must be a positive whole number, not {value!r}", key)
    if value > at_most:
        raise UnsupportedModel(f"{key} must be at most {at_most}", key)
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UnsupportedModel(f"{key} must be a positive number, not {value!r}", key)
    return float(value)
