"""The files of an uploaded model: names, size limits, and the values that the store itself reads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from torchrelay.modelspec.text_part import text_config

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # for requests with tools
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODULES, POOLING = "modules.json", "1_Pooling/config.json"  # of sentence-transformers: how texts are embedded
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's, uploaded without others
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
MAX_ADAPTER_BYTES = 512 << 20
PASSED_ON = (GENERATION, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
MAX_FILE_BYTES = {  # of all files but weights; an upload may have no others
    **dict.fromkeys((CONFIG, GENERATION), 1 << 20),
    **dict.fromkeys((MODULES, POOLING), 64 << 10),
    **dict.fromkeys((TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS), 4 << 20),
    INDEX_FILE: 16 << 20,  # a model of 91,000 tensors has one of 9 MB
    **dict.fromkeys((TOKENIZER, "vocab.json", "merges.txt"), 64 << 20),
    **dict.fromkeys((TEMPLATE, TOOL_TEMPLATE), 256 << 10),
    ADAPTER_CONFIG: 64 << 10,
    ADAPTER_WEIGHTS: MAX_ADAPTER_BYTES,
}


_WEIGHTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")


def is_weights_file(path: str) -> bool:
    """Whether a file of this name holds weights; an index may name files as it likes."""
    return _WEIGHTS.fullmatch(path) is not None


class _TokenEntry(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_TokenEntry] = []


def eos_token_ids(read: Callable[[str], bytes | None], config: dict[str, Any]) -> list[Any]:
    """The tokens that end an answer: those of generation_config.json, those of config.json, and the tokenizer's own, as
    vLLM and SGLang have it. ``read``: the content of a file of the model; None if it has none.
    """
    served = text_config(config)
    of_config = named_tokens(served.get("eos_token_id"))
    token_ids = named_tokens(_document(read(GENERATION)).get("eos_token_id")) or of_config
    own, vocab_size = _tokenizer_eos(_document(read(TOKENIZER_CONFIG)), read), served.get("vocab_size")
    highest = vocab_size if isinstance(vocab_size, int) else sys.maxsize
    known = {token_id for token_id in token_ids if isinstance(token_id, int)}
    more = (each for each in (*of_config, own) if isinstance(each, int) and 0 <= each < highest)
    return token_ids + [each for each in dict.fromkeys(more) if each not in known]


def named_tokens(value: Any) -> list[Any]:
    """The tokens that an ``eos_token_id`` names, in either of its forms."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _tokenizer_eos(tokenizer_config: dict[str, Any], read: Callable[[str], bytes | None]) -> int | None:
    """The id of the tokenizer's ``eos_token``; None if it names none that is an added token."""
    token = tokenizer_config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or not content:
        return None
    declared = tokenizer_config.get("added_tokens_decoder")
    for token_id, entry in declared.items() if isinstance(declared, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == content and token_id.isascii() and token_id.isdigit():
            return int(token_id)
    try:
        added = msgspec.json.decode(read(TOKENIZER) or b"{}", type=_AddedTokens).added_tokens
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # the tokenizer's own check says what is wrong
    return next((entry.id for entry in added if entry.content == content), None)


def _document(encoded: bytes | None) -> dict[str, Any]:
    try:
        document = json.loads(encoded or b"{}")
    except (ValueError, RecursionError):
        return {}  # the packer refuses it by name
    return document if isinstance(document, dict) else {}
