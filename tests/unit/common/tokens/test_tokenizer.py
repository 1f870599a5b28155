"""Loading tokenizers in parts and as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from tests.support.sample_tokenizers import (
    EOS,
    SENTENCES,
    byte_fallback_tokenizer,
    tiny_tokenizer,
)
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer

TINY = tiny_tokenizer()


def with_old_merges(json_bytes: bytes) -> bytes:
    fields = json.loads(json_bytes)
    fields["model"]["merges"] = [" ".join(pair) for pair in fields["model"]["merges"]]
    return json.dumps(fields).encode()


def with_model(json_bytes: bytes, **changes: Any) -> bytes:
    fields = json.loads(json_bytes)
    fields["model"] |= changes
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "encoded",
    [
        TINY,
        with_old_merges(TINY),
        json.dumps(json.loads(TINY), indent=2, ensure_ascii=True).encode(),
        with_model(TINY, ignore_merges=True),
        byte_fallback_tokenizer(),
    ],
    ids=["pairs", "lines", "indented", "ignore_merges", "byte_fallback"],
)
def test_loading_in_parts_gives_same_tokenizer(encoded: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(encoded)
    whole = Tokenizer.from_str(encoded.decode())
    for loaded in (load_tokenizer(encoded), load_tokenizer(path)):
        assert json.loads(loaded.to_str()) == json.loads(whole.to_str())
        for text in (*SENTENCES, f"a {EOS}<s> b<tool>", "hello ello  hé"):
            assert loaded.encode(text).ids == whole.encode(text).ids


def test_token_with_space_is_loaded_whole() -> None:
    vocab = {"a": 0, " ": 1, "b": 2, " b": 3, "a b": 4}
    model = BPE(vocab=vocab, merges=[(" ", "b"), ("a", " b")])
    loaded = load_tokenizer(Tokenizer(model).to_str().encode())
    assert loaded.encode("a b").ids == Tokenizer(model).encode("a b").ids == [4]


def test_other_model_kinds_load_without_truncation() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    loaded = load_tokenizer(tokenizer.to_str().encode())
    assert loaded.encode("a b a b").ids == [0, 1, 0, 1]


@pytest.mark.parametrize("encoded", [b"", b"{}", b"[1]", b"{nonsense", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_invalid_tokenizer_is_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_tokenizer(encoded)
    assert caught.value.field == "tokenizer.json"


def test_malformed_merges_are_refused() -> None:
    for merges in ([["a", "b", "c"]], [["a"]], ["ab"], [3]):
        with pytest.raises(InvalidRequest):
            load_tokenizer(with_model(TINY, merges=merges))


def test_thousands_of_added_tokens_keep_their_ids() -> None:
    """Special and other tokens in turn: added one by one, they would take minutes."""
    fields = json.loads(TINY)
    size = len(fields["model"]["vocab"])
    fields["added_tokens"] += [
        {"id": size + index, "content": f"<extra {index}>", "special": index % 2 == 0} for index in range(12_000)
    ]
    encoded = json.dumps(fields).encode()
    loaded, decoder = load_tokenizer(encoded), load_decoder(encoded)
    added = loaded.get_added_tokens_decoder()
    for entry in fields["added_tokens"]:
        token = added.pop(entry["id"])
        assert (token.content, token.special) == (entry["content"], entry["special"])
        assert loaded.token_to_id(entry["content"]) == entry["id"]
        assert decoder.spelling(entry["id"]) == entry["content"]
        assert decoder.shown(entry["id"]) == (None if entry["special"] else entry["content"])
    assert not added


def test_added_tokens_get_ids_of_library() -> None:
    fields = json.loads(TINY)
    size = len(fields["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    fields["added_tokens"] += [{"id": size + 7, "content": "<x>", **flags}, {"id": size + 9, "content": "a", **flags}]
    encoded = json.dumps(fields).encode()
    whole = Tokenizer.from_str(encoded.decode()).get_added_tokens_decoder()
    assert load_tokenizer(encoded).get_added_tokens_decoder() == whole
    decoder = load_decoder(encoded)
    for token_id in range(size + 12):
        assert decoder.declared(token_id) == (whole[token_id].content if token_id in whole else None)


def test_library_panic_is_reported_as_file_error() -> None:
    """The library's parser of a normalizer's table panics, which is no ``Exception``."""
    fields = json.loads(TINY)
    fields["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": ""}
    with pytest.raises(InvalidRequest, match="panicked"):
        load_tokenizer(json.dumps(fields).encode())
