"""Writes a model as an ordinary Hugging Face folder, ready for ``torchrelay upload``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save
from tokenizers import Tokenizer

from examples.glossary.decoder import Decoder, DecoderConfig
from examples.glossary.vocabulary import CHAT_TEMPLATE, END, end_id


def write_folder(folder: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Makes ``folder`` and writes weights (fp32), configs, tokenizer and chat template into it."""
    folder.mkdir(parents=True, exist_ok=True)
    stop_id = end_id(tokenizer)
    (folder / "model.safetensors").write_bytes(save(decoder.state_dict(), metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(folder / "config.json", llama_config(decoder.config, stop_id))
    _write_json(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": stop_id, "pad_token_id": stop_id}
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": decoder.config.max_context_tokens,
            "eos_token": END,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def llama_config(config: DecoderConfig, stop_id: int) -> dict[str, Any]:
    """The ``config.json`` of a tied fp32 Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": stop_id,
        "pad_token_id": stop_id,
        "use_cache": True,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
