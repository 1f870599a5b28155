"""The order of a model's tensors in a pack.

The packer uses it to validate and lay out an upload, the engine to find its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchrelay.modelspec.architectures import ExpertNames
from torchrelay.modelspec.config import EncoderConfig, ExpertConfig, ModelConfig

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # of a model, in which it computes
SCALES = "_scales"  # the end of the name of a group with scales; what comes before names the group that they scale


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that the architecture needs. The tensors of one ``group`` are contiguous."""

    name: str
    shape: tuple[int, ...]
    group: str
    dtype: str = ""  # as in safetensors; "": the model's
    is_linear: bool = False  # a weight [out, in] that a linear layer multiplies with

    @property
    def is_scale(self) -> bool:
        """Whether it scales the outputs of a weight in int8; its dtype is one of ``DTYPE_BYTES``."""
        return self.group.endswith(SCALES)


def tensors_by_segment(config: ModelConfig) -> Iterator[tuple[TensorSpec, ...]]:
    """The tensors of segments 0, 1, ... in pack order."""
    if config.encoder is not None:
        yield from _encoder_segments(config, config.encoder)
        return
    yield (TensorSpec("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), "embed"),)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield (*_norms(config, prefix), *_attention(config, f"{prefix}self_attn."), *_mlp(config, layer, prefix))
    norm = TensorSpec("model.norm.weight", (config.hidden_size,), "norm")
    head = {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    is_int8 = config.int8 is not None and config.int8.has_head
    yield (norm, *_weights("head", head, is_int8)) if config.has_head and not config.tied_embeddings else (norm,)


def _weights(group: str, shapes: Mapping[str, tuple[int, int]], is_int8: bool) -> Iterator[TensorSpec]:
    """The weights of one projection, [out, in]; if they are in int8, then the scales of their outputs."""
    for name, shape in shapes.items():
        yield TensorSpec(name, shape, group, "I8" if is_int8 else "", is_linear=True)
    for name, (num_out, _) in shapes.items() if is_int8 else ():
        yield TensorSpec(f"{name}_scale", (num_out, 1), group + SCALES)


def _norms(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    """``post_attention_layernorm`` comes before the MLP, except with sandwich norms, where its name is true."""
    names = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
    if config.architecture.sandwich_norms:
        names = {
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "attention_out_norm",
            "pre_feedforward_layernorm": "post_norm",
            "post_feedforward_layernorm": "mlp_out_norm",
        }
    if not config.architecture.input_norms:
        names = {name: group for name, group in names.items() if group not in ("input_norm", "post_norm")}
    for name, group in names.items():
        yield TensorSpec(f"{prefix}{name}.weight", (config.hidden_size,), group)
    if config.architecture.qk_norm:
        yield TensorSpec(f"{prefix}self_attn.q_norm.weight", (config.head_dim,), "q_norm")
        yield TensorSpec(f"{prefix}self_attn.k_norm.weight", (config.head_dim,), "k_norm")
    if config.architecture.wide_qk_norm:
        for letter, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            shape = (heads * config.head_dim,)
            yield TensorSpec(f"{prefix}self_attn.{letter}_norm.weight", shape, f"wide_{letter}_norm")


def _attention(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = [("q", q_size), ("k", kv_size), ("v", kv_size)]
    if config.architecture.fused:
        sizes = [("qkv", q_size + 2 * kv_size)]
    is_int8 = config.int8 is not None
    yield from _weights("qkv", {f"{prefix}{letter}_proj.weight": (size, hidden) for letter, size in sizes}, is_int8)
    if config.architecture.qkv_bias or config.attention_bias:
        for letter, size in sizes:
            yield TensorSpec(f"{prefix}{letter}_proj.bias", (size,), "qkv_bias")
    yield from _weights("o", {f"{prefix}o_proj.weight": (hidden, q_size)}, is_int8)
    if config.attention_bias:
        yield TensorSpec(f"{prefix}o_proj.bias", (hidden,), "o_bias")


def _mlp(config: ModelConfig, layer: int, prefix: str) -> Iterator[TensorSpec]:
    experts, names = config.experts, config.architecture.experts
    if experts is not None and names is not None and layer not in experts.dense_layers:
        yield from _experts(config, experts, names, prefix)
        return
    hidden, inner, is_int8 = config.hidden_size, config.intermediate_size, config.int8 is not None
    gate_up = {f"{prefix}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    if config.architecture.fused:
        gate_up = {f"{prefix}mlp.gate_up_proj.weight": (2 * inner, hidden)}
    yield from _weights("gate_up", gate_up, is_int8)
    yield from _weights("down", {f"{prefix}mlp.down_proj.weight": (hidden, inner)}, is_int8)
    if config.mlp_bias:
        for part in ("gate", "up"):
            yield TensorSpec(f"{prefix}mlp.{part}_proj.bias", (inner,), "gate_up_bias")
        yield TensorSpec(f"{prefix}mlp.down_proj.bias", (hidden,), "down_bias")


def _experts(config: ModelConfig, experts: ExpertConfig, names: ExpertNames, prefix: str) -> Iterator[TensorSpec]:
    hidden, inner, is_int8 = config.hidden_size, experts.intermediate_size, config.int8 is not None
    yield TensorSpec(f"{prefix}{names.router}", (experts.count, hidden), "router")
    numbers = range(experts.count)
    gates_ups = {prefix + name.format(each): (inner, hidden) for each in numbers for name in (names.gate, names.up)}
    yield from _weights("gate_up", gates_ups, is_int8)
    yield from _weights("down", {prefix + names.down.format(each): (hidden, inner) for each in numbers}, is_int8)
    if names.shared:
        size = experts.shared_size
        yield TensorSpec(f"{prefix}{names.shared}_gate.weight", (1, hidden), "shared_gate")
        gate_up = {f"{prefix}{names.shared}.{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
        yield from _weights("shared_gate_up", gate_up, is_int8)
        yield from _weights("shared_down", {f"{prefix}{names.shared}.down_proj.weight": (hidden, size)}, is_int8)


def _encoder_segments(config: ModelConfig, encoder: EncoderConfig) -> Iterator[tuple[TensorSpec, ...]]:
    """A norm is in the segment of the layer that follows it, and the last one in a segment of its own, so that encoders
    have as many segments as decoders.
    """
    hidden = config.hidden_size
    yield (
        TensorSpec("embeddings.word_embeddings.weight", (config.vocab_size, hidden), "embed"),
        TensorSpec("embeddings.position_embeddings.weight", (encoder.num_positions, hidden), "positions"),
        TensorSpec("embeddings.token_type_embeddings.weight", (encoder.num_token_types, hidden), "token_types"),
    )
    norm_before = "embeddings.LayerNorm"
    for layer in range(config.num_layers):
        prefix = f"encoder.layer.{layer}."
        yield (*_layer_norm(hidden, norm_before, "input_norm"), *_encoder_layer(config, prefix))
        norm_before = f"{prefix}output.LayerNorm"
    yield tuple(_layer_norm(hidden, norm_before, "norm"))


def _encoder_layer(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    for kind, group in (("weight", "qkv"), ("bias", "qkv_bias")):
        for part in ("query", "key", "value"):
            shape = (hidden, hidden) if kind == "weight" else (hidden,)
            yield TensorSpec(f"{prefix}attention.self.{part}.{kind}", shape, group)
    yield TensorSpec(f"{prefix}attention.output.dense.weight", (hidden, hidden), "o")
    yield TensorSpec(f"{prefix}attention.output.dense.bias", (hidden,), "o_bias")
    yield from _layer_norm(hidden, f"{prefix}attention.output.LayerNorm", "post_norm")
    yield TensorSpec(f"{prefix}intermediate.dense.weight", (inner, hidden), "up")
    yield TensorSpec(f"{prefix}intermediate.dense.bias", (inner,), "up_bias")
    yield TensorSpec(f"{prefix}output.dense.weight", (hidden, inner), "down")
    yield TensorSpec(f"{prefix}output.dense.bias", (hidden,), "down_bias")


def _layer_norm(size: int, prefix: str, group: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}.weight", (size,), group)
    yield TensorSpec(f"{prefix}.bias", (size,), f"{group}_bias")
