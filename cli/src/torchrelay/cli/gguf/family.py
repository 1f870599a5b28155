"""The architectures that are converted from GGUF, and their config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrelay.cli.gguf.header import GgufHeader
from torchrelay.cli.gguf.refusal import quoted, refusal


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family: how transformers calls it, and how llama.cpp stores it."""

    architecture: str
    model_type: str
    interleaved: bool = False  # the rows of q and k alternate between the halves that rotate together
    unit_offset_norms: bool = False  # the file has the weights of norms plus one
    sandwich_norms: bool = False
    windows: bool = False
    has_biases: bool = False  # of q, k and v


FAMILIES: Mapping[str, GgufFamily] = {  # by general.architecture
    "llama": GgufFamily("LlamaForCausalLM", "llama", interleaved=True),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", interleaved=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", has_biases=True),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", unit_offset_norms=True, sandwich_norms=True, windows=True),
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, as a divisor of each frequency
_LLAMA3_ORIGINAL = 8192  # the value of all published Llama 3 models; the factors are compared


class Metadata:
    """The values below an architecture's prefix, checked for their types. Raises ``CliError`` with the key."""

    def __init__(self, header: GgufHeader, prefix: str) -> None:
        self._header, self._prefix = header, prefix

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._header.metadata.get(f"{self._prefix}.{key}", default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise refusal(self._header.path, f"{self._prefix}.{key}", f"{quoted(value)} is not a positive number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._header.metadata.get(f"{self._prefix}.{key}", default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise refusal(self._header.path, f"{self._prefix}.{key}", f"{quoted(value)} is not a positive number")
        rounded = float(str(np.float32(value)))  # the shortest text of the file's fp32
        if not 0 < rounded < math.inf:
            raise refusal(self._header.path, f"{self._prefix}.{key}", f"{quoted(value)} is not in the range of fp32")
        return rounded

    def refuse_unless(self, key: str, served: Any) -> None:
        """Refuses a value other than the served one; a missing value is that."""
        value = self._header.metadata.get(f"{self._prefix}.{key}", served)
        if value != served:
            fault = f"{quoted(value)} is not supported; supported is {served!r}"
            raise refusal(self._header.path, f"{self._prefix}.{key}", fault)


def family_of(header: GgufHeader) -> GgufFamily:
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        fault = f"{quoted(name)} is not supported; supported are {', '.join(FAMILIES)}"
        raise refusal(header.path, "general.architecture", fault)
    return FAMILIES[name]


def config_of(header: GgufHeader, family: GgufFamily, rope_factors: list[float] | None) -> dict[str, Any]:
    """config.json. ``rope_factors``: the values of ``ROPE_FACTORS``, if the file has them. Raises ``CliError``."""
    values = Metadata(header, header.metadata["general.architecture"])
    heads, hidden = values.whole("attention.head_count"), values.whole("embedding_length")
    head_dim = values.whole("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        values.refuse_unless(key, head_dim)
    values.refuse_unless("expert_count", 0)
    values.refuse_unless("rope.scaling.type", "none")
    for key in ("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear"):  # linear without a type
        values.refuse_unless(key, 1.0)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise refusal(header.path, "token_embd.weight", "the tensor is missing")
    theta = values.real("rope.freq_base", 10_000.0)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": values.whole("feed_forward_length"),
        "num_hidden_layers": values.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": values.whole("context_length"),
        "rms_norm_eps": values.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_theta": theta,
    }
    if rope_factors is not None:
        config["rope_scaling"] = _llama3_scaling(header, rope_factors, theta, head_dim)
    if family.windows:
        config["sliding_window"] = values.whole("attention.sliding_window")
        config["attn_logit_softcapping"] = values.real("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = values.real("final_logit_softcapping", 30.0)
        # llama.cpp keeps no query_pre_attn_scalar: it is 256 but for the model of 46 layers.
        config["query_pre_attn_scalar"] = hidden // heads if config["num_hidden_layers"] == 46 else 256
    for field, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if isinstance(token := header.metadata.get(f"tokenizer.ggml.{key}_token_id"), int):
            config[field] = token
    return config


def _llama3_scaling(header: GgufHeader, factors: list[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters that give the file's factors, which must be those of a published Llama 3."""
    if not all(1.0 <= each < math.inf for each in factors):
        raise refusal(header.path, ROPE_FACTORS, "its values are not numbers of at least 1")
    factor = max(factors, default=1.0)
    expected = [_llama3_factor(theta ** (2 * pair / head_dim), factor) for pair in range(head_dim // 2)]
    close = len(factors) == len(expected) and all(
        math.isclose(own, other, rel_tol=1e-4) for own, other in zip(factors, expected, strict=True)
    )
    if not close:
        raise refusal(header.path, ROPE_FACTORS, "its values are not those of Llama 3's scaling")
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "rope_type": "llama3",
        "factor": float(str(np.float32(factor))),
        **bounds,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _llama3_factor(inverse_frequency: float, factor: float) -> float:
    """The divisor of a frequency: 1 for short wavelengths, ``factor`` for long ones, between them a blend."""
    turns = _LLAMA3_ORIGINAL / (2 * math.pi * inverse_frequency)
    if turns > 4.0:
        return 1.0
    if turns < 1.0:
        return factor
    blend = (turns - 1.0) / 3.0
    return 1.0 / ((1 - blend) / factor + blend)
