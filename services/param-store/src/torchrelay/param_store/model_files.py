"""The files of an uploaded model: names, size limits, and what the store itself reads in them."""

from __future__ import annotations

from typing import Any

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TEMPLATE = "chat_template.jinja"
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_DOCUMENT_BYTES = 4 << 20
MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 256 << 10
PASSED_ON = (GENERATION, "tokenizer_config.json", "special_tokens_map.json")  # documents for the gateway
MAX_FILE_BYTES = {
    CONFIG: MAX_DOCUMENT_BYTES,
    TOKENIZER: MAX_TOKENIZER_BYTES,
    **dict.fromkeys(PASSED_ON, MAX_DOCUMENT_BYTES),
    TEMPLATE: MAX_TEMPLATE_BYTES,
    "vocab.json": MAX_TOKENIZER_BYTES,
    "merges.txt": MAX_TOKENIZER_BYTES,
    INDEX_FILE: MAX_DOCUMENT_BYTES,
}


def eos_token_ids(generation: dict[str, Any], config: dict[str, Any]) -> list[Any]:
    """The tokens that end an answer: those of generation_config.json if it names any, else of config.json."""
    for document in (generation, config):
        token_ids = document.get("eos_token_id")
        if token_ids is not None:
            return token_ids if isinstance(token_ids, list) else [token_ids]
    return []
