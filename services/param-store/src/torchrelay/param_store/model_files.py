"""The files of an uploaded model: names, size limits, and the values that the store itself reads."""

from __future__ import annotations

from typing import Any

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TEMPLATE = "chat_template.jinja"
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
PASSED_ON = (GENERATION, TOKENIZER_CONFIG, SPECIAL_TOKENS)  # documents that the gateway reads
MAX_FILE_BYTES = {  # of all files but weights; an upload may have no others
    **dict.fromkeys((CONFIG, GENERATION), 1 << 20),
    **dict.fromkeys((INDEX_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS), 4 << 20),
    **dict.fromkeys((TOKENIZER, "vocab.json", "merges.txt"), 64 << 20),
    TEMPLATE: 256 << 10,
}


def eos_token_ids(generation: dict[str, Any], config: dict[str, Any]) -> list[Any]:
    """The tokens that end an answer: those of generation_config.json if it names any, otherwise of config.json."""
    for document in (generation, config):
        token_ids = document.get("eos_token_id")
        if token_ids is not None:
            return token_ids if isinstance(token_ids, list) else [token_ids]
    return []
