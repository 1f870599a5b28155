"""The text part of a multimodal config is read as its text model's own; anything else is refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.modelspec.test_tensor_order import LLAMA
from torchrelay.modelspec.config import ModelConfig, read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.text_part import text_config, text_tensor_name

LLAVA, GEMMA3, MISTRAL3 = (f"{name}ForConditionalGeneration" for name in ("Llava", "Gemma3", "Mistral3"))


def multimodal(name: str, text: Any, **outer: Any) -> dict[str, Any]:
    return {"architectures": [name], "text_config": text, "vision_config": {"hidden_size": 8}, **outer}


def of_transformers(architecture: str, config: str, **text: Any) -> ModelConfig:
    """The model of a config in which transformers fills in all defaults."""
    import transformers  # takes seconds

    return read_config(getattr(transformers, config)(**text).to_dict() | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("name", "model_type", "architecture", "config", "text"),
    [
        (GEMMA3, "gemma3_text", "Gemma3ForCausalLM", "Gemma3TextConfig", {"hidden_size": 2560, "sliding_window": 1024}),
        (LLAVA, "llama", "LlamaForCausalLM", "LlamaConfig", {"vocab_size": 32_064, "max_position_embeddings": 4096}),
        (MISTRAL3, "mistral", "MistralForCausalLM", "MistralConfig", {"head_dim": 128, "sliding_window": None}),
    ],
)
def test_keys_left_out_have_the_defaults_of_transformers(
    name: str, model_type: str, architecture: str, config: str, text: dict[str, Any]
) -> None:
    parsed = read_config(multimodal(name, text | {"model_type": model_type}))
    assert parsed == of_transformers(architecture, config, **text)


@pytest.mark.parametrize(
    ("name", "of_text", "of_whole", "tied"),
    [
        (LLAVA, True, False, True),
        (LLAVA, True, None, True),
        (LLAVA, False, True, True),
        (MISTRAL3, True, False, False),
        (MISTRAL3, False, None, False),
        (MISTRAL3, None, True, True),
    ],
)
def test_head_is_tied_as_in_transformers(name: str, of_text: bool | None, of_whole: bool | None, tied: bool) -> None:
    values = {"text": of_text, "whole": of_whole}
    text, whole = ({} if value is None else {"tie_word_embeddings": value} for value in values.values())
    assert read_config(multimodal(name, LLAMA | {"model_type": "llama"} | text, **whole)).tied_embeddings is tied


def test_end_tokens_of_the_whole_count_first() -> None:
    text = LLAMA | {"model_type": "llama", "eos_token_id": 5}
    assert text_config(multimodal(LLAVA, text))["eos_token_id"] == 5
    assert text_config(multimodal(LLAVA, text, eos_token_id=[1, 6]))["eos_token_id"] == [1, 6]


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (multimodal(LLAVA, {"model_type": "cohere2"}), "text_config.model_type", "the text part 'cohere2' is not"),
        (multimodal(LLAVA, {}), "text_config.model_type", "the text part None is not supported; supported are llama,"),
        (multimodal(LLAVA, []), "text_config", "text_config must be an object"),
        (
            multimodal(LLAVA, {**LLAMA, "model_type": "llama", "hidden_size": 0}),
            "text_config.hidden_size",
            "hidden_size must be a positive whole number, not 0",
        ),
        (
            multimodal(LLAVA, {**LLAMA, "model_type": "llama"}, quantization_config={"bits": 4}),
            "text_config.quantization_config.quant_method",
            "quant_method None is not supported; supported are awq, gptq, fp8, compressed-tensors",
        ),
        (
            multimodal("PaliGemmaForConditionalGeneration", {**LLAMA, "model_type": "gemma2"}),
            "architectures",
            "'PaliGemmaForConditionalGeneration' is not supported; supported are LlamaForCausalLM,",
        ),
    ],
)
def test_unsupported_text_parts_are_refused_by_field(config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as refused:
        read_config(config)
    assert refused.value.field == field


def test_names_of_all_layouts_map_to_the_text_model() -> None:
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight", "model.norm.weight"):
        assert text_tensor_name(name) == "model.norm.weight"
    assert text_tensor_name("language_model.lm_head.weight") == text_tensor_name("lm_head.weight") == "lm_head.weight"
    others = ("vision_tower.a", "model.vision_tower.a", "multi_modal_projector.b", "visual.c", "model.visual.c")
    assert {text_tensor_name(name) for name in (*others, "image_newline", "model.image_newline")} == {None}
