"""The tokens that end an answer are named in three files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchrelay.param_store.model_files import eos_token_ids

ADDED = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "</s>"}], "model": {"vocab": {}}}


def tokens(generation: Any = None, config: Any = None, tokenizer_config: Any = None, tokenizer: Any = ADDED) -> Any:
    files = {
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
        "tokenizer.json": tokenizer,
    }
    encoded = {name: json.dumps(document).encode() for name, document in files.items() if document is not None}
    return eos_token_ids(encoded.get, config or {})


def test_all_three_files_count_each_token_once() -> None:
    eos = {"eos_token": "<|im_end|>"}
    assert tokens({"eos_token_id": [2, 5]}, {"eos_token_id": 3}, eos) == [2, 5, 3, 7]
    assert tokens({"eos_token_id": [7, 2]}, {"eos_token_id": 2}, eos) == [7, 2]
    assert tokens(None, {"eos_token_id": 2}) == [2]
    assert tokens() == []
    assert tokens({"eos_token_id": 2}, {"eos_token_id": [9, -1, "x", 4], "vocab_size": 8}, eos) == [2, 4, 7]
    assert tokens(None, {"eos_token_id": 2, "vocab_size": 7}, eos) == [2], "the model never gives it"


@pytest.mark.parametrize("form", ["</s>", {"content": "</s>", "lstrip": False}])
def test_tokenizers_own_token_is_found_in_either_file(form: Any) -> None:
    assert tokens(tokenizer_config={"eos_token": form}) == [8]
    declared = {"eos_token": form, "added_tokens_decoder": {"4": {"content": "</s>"}, "x": 1}}
    assert tokens(tokenizer_config=declared) == [4]
    assert tokens(tokenizer_config={"eos_token": "<none>"}) == tokens(tokenizer_config={"eos_token": None}) == []


@pytest.mark.parametrize("broken", [[], "text", {"added_tokens": [1]}, {"added_tokens": None}])
def test_broken_documents_name_no_token(broken: Any) -> None:
    assert tokens(tokenizer_config={"eos_token": "</s>"}, tokenizer=broken) == []
    assert eos_token_ids({"tokenizer_config.json": b"{", "generation_config.json": b"[" * 99_999}.get, {}) == []
