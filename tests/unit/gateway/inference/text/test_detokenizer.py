"""The parts of tokens in the text of a choice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.sample_tokenizers import byte_fallback_tokenizer, tiny_tokenizer
from tests.support.token_decoders import decoder_of
from torchrelay.common.tokens.text_stream import prompt_end
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.gateway.inference.text.detokenizer import ChoiceDetokenizer, PlacedToken


def word_tokenizer(decoder: Any, *pieces: str) -> Tokenizer:
    """Encodes nothing: tests give ids."""
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.decoder = decoder
    return tokenizer


def split_tokenizer() -> Tokenizer:
    """GPT-2's kind, where a token may be a space and the beginning of a character: "Ġ" and 0xF0 here."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "ð"), ("Ł", "Ķ")]
    vocab = {letter: index for index, letter in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZERS = {
    "tiny": Tokenizer.from_str(tiny_tokenizer().decode()),
    "byte fallback": Tokenizer.from_str(byte_fallback_tokenizer().decode()),
    "split": split_tokenizer(),
}
WORD_TOKENIZERS = {
    "metaspace": word_tokenizer(decoders.Metaspace(), "▁a", "▁", "b", "é", "🔥"),
    "wordpiece": word_tokenizer(decoders.WordPiece(cleanup=False), "a", "##b", "é", "🔥"),
    "bpe": word_tokenizer(decoders.BPEDecoder(), "a</w>", "b", "é</w>", "🔥"),
}


def placed(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> tuple[str, list[PlacedToken]]:
    """The text of an answer, and its tokens."""
    decoder = decoder_of(tokenizer)
    tokens, text = TokenBytes(decoder), ChoiceDetokenizer(decoder, prompt_end(decoder, prompt), (), ())
    listed = [text.step_placed(token_id, tokens.in_text(token_id)) for token_id in answer]
    return "".join([token.shown for token in listed]) + text.flush(), listed


def check_parts(text: str, tokens: list[PlacedToken]) -> None:
    """Checks that bytes join to the text, and that each offset is the character of the token's first byte."""
    assert b"".join(token.encoded for token in tokens) == text.encode()
    before = b""
    for token in tokens:
        assert token.offset == len(before.decode(errors="ignore")), (text, tokens)
        before += token.encoded
    places = [*(token.offset for token in tokens), len(text)]
    assert "".join(text[begin:end] for begin, end in pairwise(places)) == text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=st.sampled_from(["", "hello"]), text=st.text("abhelo é🔥", max_size=20))
@example(prompt="", text="a 🔥🔥 b")
def test_bytes_join_to_text_and_offsets_slice_it(name: str, prompt: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    shown, tokens = placed(tokenizer, tokenizer.encode(prompt).ids, tokenizer.encode(text).ids)
    check_parts(shown, tokens)


@pytest.mark.parametrize("name", WORD_TOKENIZERS)
@given(data=st.data())
def test_bytes_have_spaces_that_decoder_adds(name: str, data: st.DataObject) -> None:
    tokenizer = WORD_TOKENIZERS[name]
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=8)
    check_parts(*placed(tokenizer, data.draw(ids), data.draw(ids)))


def test_token_of_space_and_half_a_character() -> None:
    """The next token begins within the character, not at the space."""
    tokenizer = TOKENIZERS["split"]
    text, tokens = placed(tokenizer, [], tokenizer.encode("a 🔥b").ids)
    assert text == "a 🔥b"
    assert [(token.encoded, token.offset) for token in tokens] == [
        (b"a", 0),
        (b" \xf0", 1),
        (b"\x9f\x94", 2),
        (b"\xa5", 2),
        (b"b", 3),
    ]


def test_tokens_without_text_have_no_bytes() -> None:
    decoder = decoder_of(TOKENIZERS["tiny"])
    tokens, (hello, end) = TokenBytes(decoder), TOKENIZERS["tiny"].encode("h<|end|>").ids
    text = ChoiceDetokenizer(decoder, (), (), ())
    assert [text.step_placed(token_id, tokens.in_text(token_id)) for token_id in (hello, end, hello)] == [
        ("h", b"h", 0),
        ("", b"", 1),
        ("h", b"h", 1),
    ]
    ended = ChoiceDetokenizer(decoder, (), (), [hello])
    assert ended.step_placed(hello, b"h") == ("", b"", 0)


def test_invalid_bytes_are_exact() -> None:
    """The text shows them as U+FFFD."""
    tokenizer = TOKENIZERS["tiny"]
    invalid, letter = tokenizer.token_to_id("ÿ"), tokenizer.token_to_id("h")
    assert invalid is not None and letter is not None
    text, tokens = placed(tokenizer, [], [invalid, letter, invalid])
    assert text == "\ufffdh\ufffd"
    assert [token.encoded for token in tokens] == [b"\xff", b"h", b"\xff"]


MARKED = Tokenizer.from_str(tiny_tokenizer().decode())
MARKED.add_special_tokens(["[A]", "[B]"])


@given(st.lists(st.sampled_from(["[A]", "[B]", "<|end|>", *"helo 🔥"]), max_size=12).map("".join), st.booleans())
@example("he[A]l[B]lo", True)
def test_markers_are_shown_in_their_places_and_change_nothing_else(answer: str, is_placed: bool) -> None:
    decoder, stops = decoder_of(MARKED), ["el", "lo", "🔥🔥"]
    tokens, plain = TokenBytes(decoder), ChoiceDetokenizer(decoder, (), stops, ())
    marked = ChoiceDetokenizer(decoder, (), stops, (), markers=frozenset({"[A]"}))
    expected, shown = "", ""
    for token_id in MARKED.encode(answer).ids:
        expected += plain.step(token_id)
        shown += marked.step_placed(token_id, tokens.in_text(token_id)).shown if is_placed else marked.step(token_id)
    expected, shown = expected + plain.flush(), shown + marked.flush()
    assert shown.replace("[A]", "") == expected and marked.stop_string == plain.stop_string
    assert answer.replace("[B]", "").replace("<|end|>", "").startswith(shown)
