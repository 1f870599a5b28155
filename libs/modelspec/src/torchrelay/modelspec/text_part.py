"""The text part of a multimodal checkpoint: its config, and the names of its tensors.

Without images such a model computes what its text model alone computes, so it is served as that. The tensors of vision
towers and projectors are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.modelspec.errors import UnsupportedModel, shown

# Models whose prompts differ from those of their text model only by the embeddings of images. PaliGemma is not one of
# them: its prompts attend in both directions.
MULTIMODAL = (
    "Gemma3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
_ARCHITECTURES = {  # by the model_type of the text part
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # transformers', which published text configs leave out
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "eos_token_id": 1,
    },
}
_TIED_BY_TEXT = ("Llava", "Qwen")  # earlier versions of these wrote tie_word_embeddings into their text config
_OUTER_KEYS = ("eos_token_id", "quantization_config")  # count before those of the text config
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.", "image_newline")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a model of which only the text part is served."""
    names = config.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in MULTIMODAL


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the model that is served: of the text part, or ``config`` itself. Raises ``UnsupportedModel``."""
    if not is_multimodal(config):
        return config
    text = config.get("text_config", config)  # early Qwen2-VL configs are flat
    if not isinstance(text, Mapping):
        raise UnsupportedModel("text_config must be an object", "text_config")
    model_type = text.get("model_type")
    if model_type not in _ARCHITECTURES:
        known = ", ".join(name for name in _ARCHITECTURES)
        raise UnsupportedModel(
            f"the text part {shown(model_type)} is not supported; supported are {known}", "text_config.model_type"
        )
    outer = {key: config[key] for key in _OUTER_KEYS if config.get(key) is not None}
    served = {**_DEFAULTS.get(model_type, {}), **text, **outer, "architectures": [_ARCHITECTURES[model_type]]}
    tied = config.get("tie_word_embeddings")
    if tied or (tied is False and not config["architectures"][0].startswith(_TIED_BY_TEXT)):
        served["tie_word_embeddings"] = tied
    for key in ("rope_parameters", "rope_scaling"):  # text has the same position in all sections of Qwen's embeddings
        rope = served.get(key)
        if isinstance(rope, Mapping) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            served[key] = {**rope, "type": "default", "rope_type": "default"}
    return served


def text_tensor_name(name: str) -> str | None:
    """The name of a multimodal checkpoint's tensor in the text model; None for one of another part."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return None if name.removeprefix("model.").startswith(_OTHER_PARTS) else name
