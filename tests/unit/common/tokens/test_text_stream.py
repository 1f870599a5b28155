"""Text decoded token by token equals the text decoded at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.sample_tokenizers import EOS, byte_fallback_tokenizer, tiny_tokenizer
from torchrelay.common.tokens.text_stream import MAX_HELD_TOKENS, TextStream
from torchrelay.common.tokens.tokenizer import load_tokenizer

TOKENIZER = Tokenizer.from_str(tiny_tokenizer().decode())


def decoded(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    stream = TextStream(tokenizer)
    return "".join([stream.step(token_id) for token_id in token_ids]) + stream.flush()


@given(st.text(max_size=40))
def test_streamed_text_is_the_whole_text(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert streamed(TOKENIZER, ids) == decoded(TOKENIZER, ids)


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=MAX_HELD_TOKENS - 1))
def test_any_tokens_even_of_broken_characters_give_the_whole_text(ids: list[int]) -> None:
    assert streamed(TOKENIZER, ids) == decoded(TOKENIZER, ids)


BYTES = load_tokenizer(byte_fallback_tokenizer())


@given(st.text("abhelo é🔥", max_size=30))
def test_spaces_and_bytes_of_another_decoder_come_through(text: str) -> None:
    ids = BYTES.encode(text).ids
    assert streamed(BYTES, ids) == decoded(BYTES, ids)


def test_special_tokens_have_no_text() -> None:
    eos = TOKENIZER.token_to_id(EOS)
    assert eos is not None
    ids = [eos, *TOKENIZER.encode("hello").ids, eos]
    assert streamed(TOKENIZER, ids) == "hello"


def test_invalid_bytes_without_end_are_shown_and_forgotten() -> None:
    """A model gone wrong must not make each step dearer than the one before."""
    invalid = TOKENIZER.token_to_id("ÿ")  # the byte 0xff
    assert invalid is not None
    stream = TextStream(TOKENIZER)
    text = "".join([stream.step(invalid) for _ in range(MAX_HELD_TOKENS * 10)])
    assert text == "\ufffd" * MAX_HELD_TOKENS * 10
    assert "".join([stream.step(token) for token in TOKENIZER.encode(" hello").ids]) == " hello"
