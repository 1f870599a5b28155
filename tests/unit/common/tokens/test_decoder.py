"""A tokenizer loaded to decode gives the text that the whole tokenizer gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from tests.support.peak_memory import peak_kb
from tests.support.sample_tokenizers import byte_fallback_tokenizer, large_tokenizer, tiny_tokenizer
from torchrelay.common.tokens.text_stream import TextStream
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer
from torchrelay.gateway.inference.text.token_bytes import TokenBytes


def with_added_tokens(model: Any, decoder: Any) -> bytes:
    """Added tokens of every kind: in the vocabulary and beyond it, special and not, changed by the normalizer."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "a"])
    tokenizer.add_tokens([AddedToken("<Tool>"), AddedToken("b", lstrip=True)])
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer.to_str().encode()


PIECES = ["a", "b", "##c", "▁d", "é", " ", ".", "'s", "<0xC3>", "<0xA9>", "e</w>", "<pad>", "|"]
VOCAB = {piece: index for index, piece in enumerate(PIECES)}
SAMPLES = {
    "tiny": tiny_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "large": large_tokenizer(4000),
    "bpe": with_added_tokens(BPE(dict(VOCAB), [], unk_token="a"), decoders.BPEDecoder()),
    "unigram": with_added_tokens(Unigram([(piece, -1.0) for piece in PIECES], 0, False), decoders.Metaspace()),
    "wordpiece": with_added_tokens(WordPiece(dict(VOCAB), unk_token="a"), decoders.WordPiece()),
    "wordlevel": with_added_tokens(WordLevel(dict(VOCAB), unk_token="a"), decoders.CTC()),
}
LOADED = {
    name: (Tokenizer.from_str(encoded.decode()), load_tokenizer(encoded), load_decoder(encoded))
    for name, encoded in SAMPLES.items()
}


def decoded(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return text


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    """What the library's stream gives for each token; it fails when a token changes the text before it."""
    stream, pieces = DecodeStream(skip_special_tokens=True), list[str | None]()
    for token_id in ids:
        try:
            pieces.append(stream.step(tokenizer, token_id))
        except Exception as error:
            return [*pieces, str(error)]
    return pieces


@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
def test_the_text_is_that_of_the_whole_tokenizer(name: str, data: st.DataObject) -> None:
    whole, *others = LOADED[name]
    ids = data.draw(st.lists(st.integers(0, whole.get_vocab_size() + 2), max_size=20))
    for loaded in others:
        for skip in (True, False):
            assert decoded(loaded, ids, skip_special_tokens=skip) == decoded(whole, ids, skip_special_tokens=skip)
        assert streamed(loaded, ids) == streamed(whole, ids)
        stream, expected = TextStream(loaded), TextStream(whole)
        assert [stream.step(token_id) for token_id in ids] == [expected.step(token_id) for token_id in ids]
        assert stream.flush() == expected.flush()


@pytest.mark.parametrize("name", SAMPLES)
def test_tokens_have_the_same_names_and_bytes(name: str) -> None:
    whole, _, loaded = LOADED[name]
    assert loaded.get_vocab() == whole.get_vocab()
    assert loaded.get_added_tokens_decoder() == whole.get_added_tokens_decoder()
    expected, found = TokenBytes(whole), TokenBytes(loaded)
    for token_id in range(whole.get_vocab_size() + 2):
        assert loaded.id_to_token(token_id) == whole.id_to_token(token_id)
        assert found.of(token_id) == expected.of(token_id)


@pytest.mark.parametrize("name", SAMPLES)
def test_no_part_that_encodes_is_loaded(name: str) -> None:
    _, _, loaded = LOADED[name]
    fields = json.loads(loaded.to_str())
    assert (fields["pre_tokenizer"], fields["post_processor"]) == (None, None)
    assert not fields["model"].get("merges")


def test_no_pattern_is_compiled() -> None:
    """Not even one that the library refuses. A token that it should normalize is spelt as declared."""
    fields = json.loads(SAMPLES["bpe"])
    fields["pre_tokenizer"]["pattern"] = {"Regex": "("}
    lowercase, replace = {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [lowercase, replace]}
    loaded = load_decoder(json.dumps(fields).encode())
    tool = loaded.token_to_id("<Tool>")
    assert tool is not None
    assert decoded(loaded, [12, tool, 12], skip_special_tokens=True) == "|<Tool>|"


def test_it_takes_less_memory_than_the_whole(tmp_path: Path) -> None:
    """Each in a process of its own."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(large_tokenizer())
    decoder_kb, whole_kb = (peak_kb(load, path) for load in ("load_decoder", "load_tokenizer"))
    assert decoder_kb < 0.97 * whole_kb
    assert decoder_kb < 50 * 1024
