"""Tiny random Hugging Face checkpoints of every supported family, made with transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

VOCAB_SIZE = 320  # a byte-level tokenizer of 256 + 3 tokens, and some that it never gives
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE |= {"original_max_position_embeddings": 128, "beta_fast": 4.0}
LONG_ROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0}
LONG_ROPE |= {"short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0], "long_factor": [9.0] * 6, "partial_rotary_factor": 0.75}
GEMMA3_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}


@dataclass(frozen=True)
class Family:
    """The parts of a kind of checkpoint."""

    config: str  # the class in transformers
    model: str
    extra: dict[str, Any]


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", {}),
    "llama3-rope": Family("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": 20}),
    "qwen2-window": Family(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 24,
            "sliding_window": 20,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 24, "sliding_window": 20, "query_pre_attn_scalar": 40, "rope_parameters": GEMMA3_ROPE}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "llama-bias": Family("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-bias": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24, "attention_bias": True}),
    "granite": Family(
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1},
    ),
    "yarn-rope": Family("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": YARN_ROPE}),
    "phi3-long-rope": Family(
        "Phi3Config", "Phi3ForCausalLM", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 256}
    ),
    "smollm3": Family("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "smollm3-window": Family(
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 20},
    ),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 20}),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
    "qwen3-moe-dense": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", {}),
    "qwen2-moe": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"shared_expert_intermediate_size": 56, "decoder_sparse_step": 1},
    ),
}

OPAQUE_FAMILIES = {  # that vLLM alone computes
    "glm4": Family("Glm4Config", "Glm4ForCausalLM", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "cohere2": Family(
        "Cohere2Config", "Cohere2ForCausalLM", {"head_dim": 32, "sliding_window": 32, "logit_scale": 1.0}
    ),
    "olmoe": Family("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": Family("StableLmConfig", "StableLmForCausalLM", {"partial_rotary_factor": 0.5}),
    "gpt-oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
    "deepseek2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        | {"qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def make_checkpoint(
    folder: Path, family: str, *, tied: bool = False, dtype: str = "float32", seed: int = 0, **config: Any
) -> Path:
    """Writes config.json, model.safetensors and a tokenizer; the same bytes for the same arguments.

    Every parameter is random, norms and biases too, and large enough that greedy continuations do not just repeat.
    ``config`` overrides numbers of config.json.
    """
    transformers = _transformers()
    kind = (FAMILIES | OPAQUE_FAMILIES)[family]
    numbers: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    settings = getattr(transformers, kind.config)(**{**numbers, **kind.extra, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, kind.model)(settings).to(getattr(torch, dtype))
        randomise(model, seed, norm=0.0 if family.startswith("gemma") else 1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


ENCODERS = {"BertModel": "BertConfig", "RobertaModel": "RobertaConfig", "XLMRobertaModel": "XLMRobertaConfig"}
OPAQUE_ENCODERS = {  # that vLLM alone computes
    "ModernBertModel": "ModernBertConfig",
    "ModernBertForSequenceClassification": "ModernBertConfig",
    "BertForSequenceClassification": "BertConfig",
    "XLMRobertaForSequenceClassification": "XLMRobertaConfig",
    "Qwen3ForSequenceClassification": "Qwen3Config",
}
_MODERN_TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "a", "relay", "of", "weights", "##s", "two", "hosts", "pass")


def make_encoder(folder: Path, model: str = "BertModel", dtype: str = "float32", seed: int = 0, **config: Any) -> Path:
    """Writes config.json, model.safetensors and a tokenizer of a model in ``ENCODERS`` or ``OPAQUE_ENCODERS``. Every
    parameter is random.
    """
    transformers = _transformers()
    numbers: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    numbers |= {"num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 100}
    if model.startswith("ModernBert"):
        numbers |= _MODERN_TOKENS
    elif "Roberta" in model:
        numbers |= {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    settings = getattr(transformers, (ENCODERS | OPAQUE_ENCODERS)[model])(**{**numbers, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = getattr(transformers, model)(settings).to(getattr(torch, dtype))
        randomise(encoder, seed)
    encoder.save_pretrained(folder)
    _write_word_pieces(folder)
    return folder


def _write_word_pieces(folder: Path) -> None:
    """A tokenizer as BERT's, which adds [CLS] and [SEP], and pads and truncates as all-MiniLM's file says."""
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:4]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))],
    )
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16, pad_token="[PAD]")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@torch.no_grad()
def encoder_states(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """The last hidden states of transformers, fp32 [positions, hidden]."""
    model = _transformers().AutoModel.from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()
    ids = torch.tensor([list(prompt)])
    states: torch.Tensor = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].float()
    return states


_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
_QWEN_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2}
_QWEN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_IMAGE_TOKENS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}


@dataclass(frozen=True)
class Multimodal:
    """A multimodal model: its class's name without "Config" and so on, and the settings beside those of all."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    extra: dict[str, Any]


MULTIMODAL = {
    "llava-llama": Multimodal(
        "Llava",
        {"model_type": "llama"},
        {**_VISION, "model_type": "clip_vision_model", "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        {"image_token_index": 300},
    ),
    "llava-qwen2-tied": Multimodal(
        "Llava",
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {**_VISION, "model_type": "clip_vision_model", "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        {"image_token_index": 300},
    ),
    "gemma3": Multimodal(
        "Gemma3",
        {**FAMILIES["gemma3"].extra, "model_type": "gemma3_text"},
        {**_VISION, "model_type": "siglip_vision_model", "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4, "image_token_index": 300},
    ),
    "mistral3": Multimodal(
        "Mistral3",
        {"model_type": "mistral", "sliding_window": 20},
        {**_VISION, "model_type": "pixtral", "num_hidden_layers": 1},
        {"image_token_index": 300, "tie_word_embeddings": False},
    ),
    "internvl": Multimodal(
        "InternVL",
        {"model_type": "qwen3", "head_dim": 24},
        {**_VISION, "num_hidden_layers": 1, "image_size": [28, 28], "patch_size": [14, 14]},
        {"image_token_id": 300, "tie_word_embeddings": False},
    ),
    "qwen2.5-vl": Multimodal(
        "Qwen2_5_VL",
        {"rope_parameters": _QWEN_ROPE},
        {**_QWEN_VISION, "intermediate_size": 48, "fullatt_block_indexes": [0]},
        _IMAGE_TOKENS,
    ),
    "qwen3-vl": Multimodal(
        "Qwen3VL",
        {"head_dim": 16, "rope_parameters": {**_QWEN_ROPE, "mrope_interleaved": True}},
        {**_QWEN_VISION, "intermediate_size": 48, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        _IMAGE_TOKENS,
    ),
}

OPAQUE_MULTIMODAL = {  # whose text part vLLM alone computes
    "idefics3": Multimodal(
        "Idefics3",
        {"model_type": "llama", "hidden_size": 128, "head_dim": 32, "pad_token_id": 258},
        {**_VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        {"image_token_id": 300, "pad_token_id": 258},
    ),
}


def make_multimodal_checkpoint(folder: Path, name: str) -> Path:
    """Writes config.json, model.safetensors and a tokenizer of a model with vision tower and projector."""
    transformers, kind = _transformers(), (MULTIMODAL | OPAQUE_MULTIMODAL)[name]
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 257}
    settings = getattr(transformers, f"{kind.name}Config")(
        text_config={**text, **kind.text}, vision_config=kind.vision, **kind.extra
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind.name}ForConditionalGeneration")(settings)
        randomise(model, 0, norm=0.0 if name.startswith("gemma") else 1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def make_overflowing_checkpoint(folder: Path) -> Path:
    """A checkpoint of finite weights whose logit of token 3 overflows for some prompts, and is -infinity for others."""
    from safetensors.torch import load_file, save_file

    make_checkpoint(folder, "llama")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[3] = 0.0
    head[3, 3] = torch.finfo(head.dtype).max  # times a normed hidden state beyond 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _transformers() -> Any:
    """Imported late, since it takes seconds, and without its progress bars."""
    import transformers

    logging: Any = transformers.logging
    logging.disable_progress_bar()
    return transformers


def randomise(model: torch.nn.Module, seed: int, norm: float = 1.0) -> None:
    """Fresh values for every parameter from one generator; ``norm`` is where the weights of norms lie."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=random, dtype=torch.float32)
        if "norm" in name.lower():
            values = norm + 0.3 * values
        elif "embed" in name:
            values *= 0.1  # small, so that a tied head does not just repeat its input
        elif parameter.ndim > 1:
            values *= 1.5 * parameter.shape[-1] ** -0.5
        parameter.data.copy_(values.to(parameter.dtype))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges: token i is byte i in the order of the alphabet, then <s>, </s>, <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, PAD)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def declare_embeddings(folder: Path, size: int = 64, *, mode: str = "lasttoken", is_normalized: bool = True) -> Path:
    """Writes the files with which sentence-transformers saves a model of embeddings."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules if is_normalized else modules[:2]))
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    pooling: dict[str, Any] = {f"pooling_mode_{each}": each == mode for each in modes}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling |= {"word_embedding_dimension": size, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def make_headless(folder: Path) -> Path:
    """Saves a checkpoint again as a model without a head, whose tensors have no prefix."""
    _transformers().AutoModel.from_pretrained(folder, dtype="auto").save_pretrained(folder)
    return folder


def reference_model(folder: Path, auto_class: str = "AutoModelForCausalLM") -> Any:
    """The checkpoint in transformers, in its own dtype, ready for ``generate``."""
    # Plain attention: the quicker kinds leave soft caps out.
    model_of = getattr(_transformers(), auto_class).from_pretrained
    model = model_of(folder, dtype="auto", attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.no_grad()
def greedy_reference(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy continuation, exactly ``num_tokens`` long."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation
