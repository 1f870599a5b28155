"""config.json, parsed strictly: anything unsupported is refused by field."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchrelay.modelspec.architectures import ARCHITECTURES, HEADLESS, MASKED, Architecture, EncoderTraits
from torchrelay.modelspec.errors import UnsupportedModel, shown
from torchrelay.modelspec.quantization import Int8Weights, quantized_weights
from torchrelay.modelspec.text_part import MULTIMODAL, is_multimodal, text_config
from torchrelay.modelspec.vllm_quantization import VllmQuantization

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ENCODER_ACTIVATIONS = ("gelu",)
MAX_LAYERS, MAX_EXPERTS = 4096, 4096  # bounds the memory that a config alone can make its reader use
MAX_HEAD_DIM = 1024  # kernels keep a few heads on the stack
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_DEFAULT_MAX_WINDOW_LAYERS = 28  # transformers' default of max_window_layers


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency-dependent interpolation of rotary embeddings."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's scaling: short wavelengths are kept, long ones stretched by ``factor``, with a ramp over the planes
    between those that turn ``beta_fast`` and ``beta_slow`` times within the original context.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int
    truncate: bool  # the ramp begins and ends at whole planes


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: the base, and their scaling for longer contexts."""

    theta: float
    scaling: RopeScaling | YarnScaling | None = None
    linear_factor: float = 1.0
    short_factors: tuple[float, ...] = ()  # LongRoPE's divisor of each frequency, within the original context
    attention_factor: float = 1.0  # of cosines and sines
    rotated_share: float = 1.0  # of a head's first numbers; the others are not rotated


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Granite's factors; logits are divided by theirs."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A mixture of experts that replaces the MLP of all layers but the dense ones."""

    count: int
    per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_size: int = 0  # of the expert that computes every token; 0: there is none
    dense_layers: frozenset[int] = frozenset()  # layers with an MLP instead


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The embeddings of positions and of token types, which encoders have instead of rotations."""

    num_positions: int
    num_token_types: int
    padding_id: int | None  # positions begin after this number; None: at 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The computation that config.json describes."""

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
    activation: str  # one of ACTIVATIONS or, of an encoder, ENCODER_ACTIVATIONS
    rope: RopeConfig | None  # None: an encoder
    local_rope: RopeConfig | None  # of windowed layers; None: the same
    windows: tuple[int | None, ...]  # per layer: positions it attends to, its own included; None: all
    query_scale: float  # factor of the attention scores
    score_cap: float | None
    logit_cap: float | None
    experts: ExpertConfig | None
    tied_embeddings: bool
    unrotated_layers: frozenset[int] = frozenset()
    attention_bias: bool = False  # of all projections of the attention
    mlp_bias: bool = False
    multipliers: Multipliers = Multipliers()
    int8: Int8Weights | None = None
    vllm: VllmQuantization | None = None  # neither this nor int8: all weights are in the model's dtype
    has_head: bool = True  # False: it gives hidden states instead of tokens
    encoder: EncoderConfig | None = None  # None: a decoder

    @property
    def num_segments(self) -> int:
        return self.num_layers + 2

    @property
    def needed_engine(self) -> str:
        """The only engine that computes the weights; empty: any."""
        if self.vllm is not None:
            return "vllm"
        return "" if self.int8 is None else "torchrelay"

    def weights_dtype(self, dtype: str) -> str:
        """The dtype of linear layers' weights, as users see it, in a model of ``dtype``."""
        if self.vllm is not None:
            return self.vllm.stored
        return dtype if self.int8 is None else "I8"

    @property
    def rotates_whole_heads(self) -> bool:
        return self.rope is None or self.rope.rotated_share == 1.0


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Validates config.json; of a multimodal model the text part. Raises ``UnsupportedModel``."""
    if not is_multimodal(config) or "text_config" not in config:
        return _read_text_model(text_config(config))
    text = text_config(config)
    try:
        return _read_text_model(text)
    except UnsupportedModel as error:
        raise UnsupportedModel(str(error), f"text_config.{error.field}") from None


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that config.json gives to the weights, by its name in safetensors; None: it gives none that is served.

    transformers 5 writes ``dtype``, earlier versions ``torch_dtype``.
    """
    text = text_config(config)
    names = (document.get(key) for document in (text, config) for key in ("dtype", "torch_dtype"))
    return next((_DTYPES[name] for name in names if isinstance(name, str) and name in _DTYPES), None)


def _read_text_model(config: Mapping[str, Any]) -> ModelConfig:
    architecture = _architecture(config)
    if architecture.encoder is not None:
        return _read_encoder(config, architecture, architecture.encoder)
    hidden, heads = _positive_int(config, "hidden_size"), _positive_int(config, "num_attention_heads")
    head_dim = _positive_int(config, "head_dim", architecture.head_dim or hidden // heads, at_most=MAX_HEAD_DIM)
    num_layers = _positive_int(config, "num_hidden_layers", at_most=MAX_LAYERS)
    score_cap, logit_cap = architecture.soft_caps or (None, None)
    unrotated = _unrotated_layers(config, architecture, num_layers)
    quantized = quantized_weights(config.get("quantization_config"))
    parsed = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_positive_int(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=_positive_int(config, "vocab_size"),
        max_context_tokens=_max_context_tokens(config),
        norm_eps=_positive_float(config, "rms_norm_eps", architecture.norm_eps),
        activation=_activation(config, architecture),
        rope=_rope(config, architecture, _FULL),
        local_rope=_rope(config, architecture, _WINDOWED) if architecture.local_rope else None,
        windows=_windows(config, architecture, num_layers, unrotated),
        query_scale=_query_scale(config, architecture, head_dim),
        score_cap=_soft_cap(config, architecture, "attn_logit_softcapping", score_cap),
        logit_cap=_soft_cap(config, architecture, "final_logit_softcapping", logit_cap),
        experts=_experts(config, architecture, num_layers),
        tied_embeddings=bool(config.get("tie_word_embeddings", architecture.tied_embeddings)),
        unrotated_layers=unrotated,
        attention_bias=_has_biases(config, architecture, "attention_bias"),
        mlp_bias=_has_biases(config, architecture, "mlp_bias"),
        multipliers=_multipliers(config) if architecture.multipliers else Multipliers(),
        int8=quantized if isinstance(quantized, Int8Weights) else None,
        vllm=quantized if isinstance(quantized, VllmQuantization) else None,
        has_head=config["architectures"][0] not in HEADLESS,
    )
    _refuse_unsupported(config, parsed)
    return parsed


def _read_encoder(config: Mapping[str, Any], architecture: Architecture, traits: EncoderTraits) -> ModelConfig:
    hidden, heads = _positive_int(config, "hidden_size"), _positive_int(config, "num_attention_heads")
    if hidden % heads:
        raise UnsupportedModel("hidden_size must be a multiple of num_attention_heads", "hidden_size")
    for key, served in (
        ("position_embedding_type", "absolute"),
        ("is_decoder", False),
        ("add_cross_attention", False),
        ("quantization_config", None),
    ):
        if config.get(key) not in (None, served):
            raise UnsupportedModel(f"{key} {shown(config[key])} is not supported; supported is {shown(served)}", key)
    num_positions = _positive_int(config, "max_position_embeddings")
    padding_id, num_skipped = None, 0
    if traits.skips_padding:
        padding_id = config.get("pad_token_id", traits.pad_token_id)
        if type(padding_id) is not int or not 0 <= padding_id < num_positions - 1:
            message = f"pad_token_id must be a whole number below max_position_embeddings - 1, not {shown(padding_id)}"
            raise UnsupportedModel(message, "pad_token_id")
        num_skipped = padding_id + 1
    num_layers = _positive_int(config, "num_hidden_layers", at_most=MAX_LAYERS)
    head_dim = hidden // heads
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=1,  # it writes no KV: this is the size of the pages that bound how many prompts run at once
        head_dim=head_dim,
        vocab_size=_positive_int(config, "vocab_size"),
        max_context_tokens=num_positions - num_skipped,
        norm_eps=_positive_float(config, "layer_norm_eps", traits.layer_norm_eps),
        activation=_activation(config, architecture),
        rope=None,
        local_rope=None,
        windows=(None,) * num_layers,
        query_scale=head_dim**-0.5,
        score_cap=None,
        logit_cap=None,
        experts=None,
        tied_embeddings=False,
        has_head=False,
        encoder=EncoderConfig(
            num_positions, _positive_int(config, "type_vocab_size", traits.type_vocab_size), padding_id
        ),
    )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    known = ARCHITECTURES | HEADLESS | MASKED
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModel(
            f"architecture {shown(name)} is not supported; supported are {', '.join(ARCHITECTURES)}, and the text part"
            f" of {', '.join(MULTIMODAL)}",
            "architectures",
        )
    return known[name]


def _refuse_unsupported(config: Mapping[str, Any], parsed: ModelConfig) -> None:
    if parsed.num_heads % parsed.num_kv_heads:
        raise UnsupportedModel("num_attention_heads must be a multiple of num_key_value_heads", "num_key_value_heads")
    if parsed.head_dim % 2:
        raise UnsupportedModel("head_dim must be even for rotary embeddings", "head_dim")
    if parsed.rope is not None:
        rotated = int(parsed.head_dim * min(parsed.rope.rotated_share, 2.0))
        if rotated % 2 or not 0 < rotated <= parsed.head_dim:
            message = f"{rotated} of {parsed.head_dim} numbers of a head cannot be rotated in pairs"
            raise UnsupportedModel(message, "partial_rotary_factor")
        if parsed.rope.short_factors and len(parsed.rope.short_factors) != rotated // 2:
            raise UnsupportedModel(f"short_factor must have {rotated // 2} numbers", "rope_scaling")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("bidirectional attention is not supported", "use_bidirectional_attention")


def _activation(config: Mapping[str, Any], architecture: Architecture) -> str:
    name = config.get(architecture.activation_key) or architecture.activation
    activations = ACTIVATIONS if architecture.encoder is None else ENCODER_ACTIVATIONS
    if name not in activations:
        key, known = architecture.activation_key, ", ".join(activations)
        raise UnsupportedModel(f"{key} {shown(name)} is not supported; supported are {known}", key)
    return str(name)


def _soft_cap(config: Mapping[str, Any], architecture: Architecture, key: str, default: float | None) -> float | None:
    cap = config.get(key, default)
    return None if architecture.soft_caps is None or cap is None else _positive_float(config, key, cap)


def _query_scale(config: Mapping[str, Any], architecture: Architecture, head_dim: int) -> float:
    if architecture.multipliers:
        return _positive_float(config, "attention_multiplier", 1.0)
    if architecture.query_scalar is None:
        return float(head_dim**-0.5)
    return float(_positive_float(config, "query_pre_attn_scalar", float(architecture.query_scalar)) ** -0.5)


def _multipliers(config: Mapping[str, Any]) -> Multipliers:
    return Multipliers(
        embedding=_positive_float(config, "embedding_multiplier", 1.0),
        residual=_positive_float(config, "residual_multiplier", 1.0),
        logits=_positive_float(config, "logits_scaling", 1.0),
    )


def _has_biases(config: Mapping[str, Any], architecture: Architecture, key: str) -> bool:
    if not config.get(key) or (key == "attention_bias" and architecture.qkv_bias):
        return False
    if key not in architecture.optional_biases:
        raise UnsupportedModel(f"{key} is not supported for this architecture", key)
    return True


def _unrotated_layers(config: Mapping[str, Any], architecture: Architecture, num_layers: int) -> frozenset[int]:
    """SmolLM3's layers without rotation: those with a 0 in no_rope_layers, by default every fourth."""
    if not architecture.unrotated_every:
        return frozenset()
    rotated = config.get("no_rope_layers")
    if rotated is None:
        every = _positive_int(config, "no_rope_layer_interval", architecture.unrotated_every)
        rotated = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or any(flag not in (0, 1) for flag in rotated):
        raise UnsupportedModel("no_rope_layers must have a 0 or a 1 for each layer", "no_rope_layers")
    return frozenset(layer for layer in range(num_layers) if not rotated[layer])


def _windows(
    config: Mapping[str, Any], architecture: Architecture, num_layers: int, unrotated: frozenset[int]
) -> tuple[int | None, ...]:
    """The window of each layer by its architecture's rules; None: the layer attends to all positions."""
    if architecture.windows == "never" or (architecture.window_switch and not config.get(architecture.window_switch)):
        return (None,) * num_layers
    window = config.get("sliding_window", architecture.window)
    if window is None and not architecture.full_every:
        return (None,) * num_layers
    window = _positive_int({"sliding_window": window}, "sliding_window")
    if architecture.windows == "every_layer":
        return (window,) * num_layers
    types = config.get("layer_types")
    if types is None and architecture.full_every:
        every = _positive_int(config, "sliding_window_pattern", architecture.full_every)
        end = _max_window_layers(config) if architecture.window_switch else num_layers
        types = [_WINDOWED if (layer + 1) % every and layer < end else _FULL for layer in range(num_layers)]
    elif types is None and architecture.unrotated_every:
        types = [_WINDOWED if layer in unrotated else _FULL for layer in range(num_layers)]
    elif types is None:
        first = _max_window_layers(config)
        types = [_WINDOWED if layer >= first else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (_WINDOWED, _FULL) for kind in types):
        raise UnsupportedModel(f"layer_types must name {_WINDOWED} or {_FULL} for each layer", "layer_types")
    return tuple(window if kind == _WINDOWED else None for kind in types)


def _max_window_layers(config: Mapping[str, Any]) -> int:
    number = config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
    if type(number) is not int:
        raise UnsupportedModel(f"max_window_layers must be a whole number, not {shown(number)}", "max_window_layers")
    return number


def _experts(config: Mapping[str, Any], architecture: Architecture, num_layers: int) -> ExpertConfig | None:
    names = architecture.experts
    if names is None:
        return None
    dense = _dense_layers(config, num_layers) if names.dense_layers else frozenset[int]()
    count_key = next((key for key in names.count_keys if key in config), names.count_keys[0])
    count = _positive_int(config, count_key, at_most=MAX_EXPERTS)
    per_token = _positive_int(config, "num_experts_per_tok", names.per_token)
    if per_token > count:
        raise UnsupportedModel(f"num_experts_per_tok must not exceed {count_key}", "num_experts_per_tok")
    norm_topk_prob = bool(config.get(names.norm_topk_prob_key)) if names.norm_topk_prob_key else True
    shared = _positive_int(config, names.shared_size_key) if names.shared else 0
    return ExpertConfig(count, per_token, _positive_int(config, names.size_key), norm_topk_prob, shared, dense)


def _dense_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """The layers that mlp_only_layers names, and those that are not the last of decoder_sparse_step layers."""
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        raise UnsupportedModel("mlp_only_layers must be a list of layers", "mlp_only_layers")
    step = _positive_int(config, "decoder_sparse_step", 1)
    return frozenset(listed) | {layer for layer in range(num_layers) if (layer + 1) % step}


def _rope(config: Mapping[str, Any], architecture: Architecture, layer_type: str) -> RopeConfig:
    """transformers 5 writes rope_parameters, by layer type where they differ; earlier versions use separate keys."""
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModel("rope_parameters must be an object", "rope_parameters")
    if architecture.local_rope and rope and layer_type not in rope:
        raise UnsupportedModel(f"rope_parameters must contain {layer_type}", "rope_parameters")
    rope = rope.get(layer_type, rope)
    if layer_type == _WINDOWED and not config.get("rope_parameters"):
        return RopeConfig(_positive_float(config, "rope_local_base_freq", 10_000.0))
    rope = rope or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModel("rope_scaling must be an object", "rope_scaling")
    default = _positive_float(config, "rope_theta", architecture.rope_theta if layer_type == _FULL else 10_000.0)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1) and not architecture.partial_rotary:
        raise UnsupportedModel(
            "partial rotary embeddings are not supported for this architecture", "partial_rotary_factor"
        )
    scaled = _scaled_rope(config, rope, _positive_float(rope, "rope_theta", default), architecture)
    if share is None:
        return scaled
    return replace(
        scaled, rotated_share=_positive_float({"partial_rotary_factor": share}, "partial_rotary_factor", 1.0)
    )


def _scaled_rope(
    config: Mapping[str, Any], rope: Mapping[str, Any], theta: float, architecture: Architecture
) -> RopeConfig:
    kind = _rope_kind(rope)
    # transformers stretches "dynamic" only beyond max_position_embeddings, where nothing is served.
    if kind in ("default", "dynamic"):
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=_positive_float(rope, "factor", 1.0))
    if kind == "longrope" or (kind in ("su", "yarn") and architecture.partial_rotary):  # names in early Phi-3 configs
        return _longrope(config, rope, theta)
    if kind == "yarn":
        return _yarn(config, rope, theta)
    if kind != "llama3":
        known = "'default', 'dynamic', 'linear', 'llama3', 'longrope' and 'yarn'"
        raise UnsupportedModel(f"rope scaling {shown(kind)} is not supported; supported are {known}", "rope_scaling")
    scaling = RopeScaling(
        factor=_positive_float(rope, "factor", 1.0),
        low_freq_factor=_positive_float(rope, "low_freq_factor", 1.0),
        high_freq_factor=_positive_float(rope, "high_freq_factor", 4.0),
        original_max_position=_positive_int(rope, "original_max_position_embeddings"),
    )
    return RopeConfig(theta, scaling)


def _rope_kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _yarn(config: Mapping[str, Any], rope: Mapping[str, Any], theta: float) -> RopeConfig:
    original = _original_context(config, rope)
    factor = _optional_float(rope, "factor", _positive_int(config, "max_position_embeddings") / original)
    scaling = YarnScaling(
        factor=factor,
        beta_fast=_optional_float(rope, "beta_fast", 32.0),
        beta_slow=_optional_float(rope, "beta_slow", 1.0),
        original_max_position=original,
        truncate=bool(rope.get("truncate", True)),
    )
    if theta <= 1 or not all(1e-3 < beta < 1e6 for beta in (scaling.beta_fast, scaling.beta_slow)):
        raise UnsupportedModel("YaRN needs rope_theta above 1, and beta_fast and beta_slow in range", "rope_scaling")
    attention_factor = _magnitude(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = _magnitude(factor, _positive_float(rope, "mscale", 1.0))
        attention_factor /= _magnitude(factor, _positive_float(rope, "mscale_all_dim", 1.0))
    return RopeConfig(theta, scaling, attention_factor=_optional_float(rope, "attention_factor", attention_factor))


def _magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cosines and sines, which makes up for flatter scores in longer contexts."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(config: Mapping[str, Any], rope: Mapping[str, Any], theta: float) -> RopeConfig:
    original = _original_context(config, rope)
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or not 0 < len(factors) <= MAX_HEAD_DIM:
        raise UnsupportedModel("short_factor must be a list of numbers", "rope_scaling")
    short = tuple(_positive_float({"short_factor": each}, "short_factor", 1.0) for each in factors)
    factor = _optional_float(rope, "factor", _positive_int(config, "max_position_embeddings") / original)
    attention_factor = 1.0
    if factor > 1 and original > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    attention_factor = _optional_float(rope, "attention_factor", attention_factor)
    return RopeConfig(theta, short_factors=short, attention_factor=attention_factor)


def _max_context_tokens(config: Mapping[str, Any]) -> int:
    """max_position_embeddings, but with LongRoPE the original context: beyond it other frequencies apply to all
    positions of a text, so that keys and values computed before would have to be computed again.
    """
    positions = _positive_int(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or "short_factor" not in rope:
        return positions
    return min(positions, _original_context(config, rope))


def _original_context(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """The context of pretraining, which some models have beside their rope parameters."""
    key = "original_max_position_embeddings"
    # transformers' Phi3Config has a default of its own.
    default = 4096 if config.get("model_type") == "phi3" else _positive_int(config, "max_position_embeddings")
    return _positive_int({key: config.get(key) or rope.get(key)}, key, default)


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None, at_most: int = 2**63 - 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{key} must be a positive whole number, not {shown(value)}", key)
    if value > at_most:
        raise UnsupportedModel(f"{key} must be at most {at_most}", key)
    return value


def _optional_float(config: Mapping[str, Any], key: str, default: float) -> float:
    return default if config.get(key) is None else _positive_float(config, key, default)


def _positive_float(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UnsupportedModel(f"{key} must be a positive number, not {shown(value)}", key)
    return float(value)
