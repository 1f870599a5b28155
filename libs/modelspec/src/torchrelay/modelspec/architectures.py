"""The architectures that Torchrelay serves, described by switches and tensor names: decoders and encoders.

A new one is an entry here, any switch it needs that does not exist yet, and its row in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts' keys in config.json, and its tensor names below a layer's prefix.

    ``gate``, ``up`` and ``down`` have a ``{}`` for the expert's number.
    """

    count_keys: tuple[str, ...]  # the first that is present: transformers 5 calls them "local"
    per_token: int  # default of num_experts_per_tok
    size_key: str  # each expert's intermediate size
    router: str
    gate: str
    up: str
    down: str
    norm_topk_prob_key: str = ""  # whether the top-k weights are normalized to sum to one; "": always
    shared: str = ""  # the prefix of an expert that computes every token, beside a gate of its own; "": none
    shared_size_key: str = ""
    dense_layers: bool = False  # config.json may name layers without experts


@dataclass(frozen=True, slots=True)
class EncoderTraits:
    """An encoder: its tensors' prefix in models with a head, and the values of keys that config.json may lack."""

    prefix: str
    skips_padding: bool = False  # positions begin after pad_token_id, and padding has that position
    layer_norm_eps: float = 1e-12
    type_vocab_size: int = 2
    pad_token_id: int = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture. The defaults are Llama's."""

    name: str
    qkv_bias: bool = False
    optional_biases: tuple[str, ...] = ()  # keys of config.json that add biases to all projections of a part
    qk_norm: bool = False
    wide_qk_norm: bool = False  # over all heads of the queries together, and over all of the keys
    fused: bool = False  # the checkpoint stores qkv_proj and gate_up_proj as one tensor each
    # Gemma: norms multiply by one plus their weight, in fp32; embeddings are scaled by the root of their size.
    unit_offset_norms: bool = False
    scaled_embeddings: bool = False
    multipliers: bool = False  # Granite: config.json has factors of embeddings, scores, residuals, and of logits
    input_norms: bool = True  # attention and MLP inputs are normalized
    sandwich_norms: bool = False  # attention and MLP outputs are normalized too, before the residual add
    soft_caps: tuple[float | None, float | None] | None = None  # defaults for scores and logits; None: never capped
    query_scalar: int | None = None  # default of query_pre_attn_scalar; scores are divided by its root; None: head_dim
    experts: ExpertNames | None = None
    windows: Literal["never", "every_layer", "by_layer_type"] = "never"
    window: int | None = None  # default of sliding_window; null in config.json turns it off
    window_switch: str = ""  # the key of config.json that must be true for windows to apply
    full_every: int = (
        0  # if config.json lists no layer types: every n-th layer has no window, nor those after the first
    )
    # max_window_layers
    partial_rotary: bool = False  # the rotation may leave the last numbers of a head out
    unrotated_every: int = 0  # if config.json does not say which: every n-th layer has no rotation
    local_rope: bool = False  # windowed layers have their own rotary frequencies
    norm_eps: float = 1e-6  # from here on: defaults for keys missing in config.json
    rope_theta: float = 10_000.0
    head_dim: int | None = None
    tied_embeddings: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    headless_suffix: str = "Model"  # that replaces ForCausalLM in the name
    encoder: EncoderTraits | None = None  # BERT's computation, which has no head and none of the switches above

    @property
    def headless_name(self) -> str:
        """The name of the same model without a head, which gives hidden states instead of tokens."""
        return self.name.replace("ForCausalLM", self.headless_suffix)


_GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    optional_biases=("attention_bias",),
    unit_offset_norms=True,
    scaled_embeddings=True,
    sandwich_norms=True,
    soft_caps=(50.0, 30.0),
    query_scalar=256,
    windows="by_layer_type",
    window=4096,
    full_every=2,
    head_dim=256,
    tied_embeddings=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
)
_GEMMA3 = replace(
    _GEMMA2,
    name="Gemma3ForCausalLM",
    qk_norm=True,
    soft_caps=(None, None),
    full_every=6,
    local_rope=True,
    rope_theta=1_000_000.0,
    headless_suffix="TextModel",
)
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    windows="every_layer",
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
    experts=ExpertNames(
        count_keys=("num_local_experts",),
        per_token=2,
        size_key="intermediate_size",
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{}.w1.weight",
        up="block_sparse_moe.experts.{}.w3.weight",
        down="block_sparse_moe.experts.{}.w2.weight",
    ),
)
_QWEN2 = Architecture(
    "Qwen2ForCausalLM", qkv_bias=True, windows="by_layer_type", window=4096, window_switch="use_sliding_window"
)
_QWEN3 = replace(_QWEN2, name="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, optional_biases=("attention_bias",))
_QWEN3_EXPERTS = ExpertNames(
    count_keys=("num_experts", "num_local_experts"),
    per_token=8,
    size_key="moe_intermediate_size",
    router="mlp.gate.weight",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
    norm_topk_prob_key="norm_topk_prob",
    dense_layers=True,
)
_QWEN3_MOE = replace(
    _QWEN3,
    name="Qwen3MoeForCausalLM",
    windows="every_layer",
    experts=_QWEN3_EXPERTS,
)
_QWEN2_MOE = replace(
    _QWEN2,
    name="Qwen2MoeForCausalLM",
    full_every=2,
    experts=replace(
        _QWEN3_EXPERTS,
        count_keys=("num_experts",),
        per_token=4,
        shared="mlp.shared_expert",
        shared_size_key="shared_expert_intermediate_size",
    ),
)
_SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM",
    optional_biases=("attention_bias", "mlp_bias"),
    windows="by_layer_type",
    window_switch="use_sliding_window",
    unrotated_every=4,
    rope_theta=2_000_000.0,
    tied_embeddings=True,
)
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("LlamaForCausalLM", optional_biases=("attention_bias", "mlp_bias")),
        Architecture("MistralForCausalLM", windows="every_layer", window=4096),
        _QWEN2,
        _QWEN3,
        _GEMMA2,
        _GEMMA3,
        Architecture("Phi3ForCausalLM", fused=True, windows="every_layer", partial_rotary=True, norm_eps=1e-5),
        _SMOLLM3,
        Architecture("GraniteForCausalLM", optional_biases=("attention_bias", "mlp_bias"), multipliers=True),
        Architecture(
            "Olmo2ForCausalLM",
            optional_biases=("attention_bias",),
            wide_qk_norm=True,
            input_norms=False,
            sandwich_norms=True,
            norm_eps=1e-5,
        ),
        _MIXTRAL,
        _QWEN2_MOE,
        _QWEN3_MOE,
        Architecture("BertModel", activation="gelu", encoder=EncoderTraits("bert.")),
        Architecture("RobertaModel", activation="gelu", encoder=EncoderTraits("roberta.", skips_padding=True)),
        Architecture("XLMRobertaModel", activation="gelu", encoder=EncoderTraits("roberta.", skips_padding=True)),
    )
}
HEADLESS = {architecture.headless_name: architecture for architecture in ARCHITECTURES.values()}
# Names of pretrained encoders, which their descendants' config.json often keep; the head for masked words is left out.
MASKED = {
    name.replace("Model", "ForMaskedLM"): architecture
    for name, architecture in ARCHITECTURES.items()
    if architecture.encoder is not None
}
