"""Text decoded token by token equals the text decoded at once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.sample_tokenizers import (
    EOS,
    PANIC,
    byte_fallback_tokenizer,
    panicking_tokenizer,
    tiny_tokenizer,
)
from tests.support.token_decoders import decoder_of
from torchrelay.common.errors import TorchrelayError
from torchrelay.common.tokens.stop_strings import StopChecker
from torchrelay.common.tokens.text_stream import MAX_HELD_TOKENS, TextStream
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer

TOKENIZER = Tokenizer.from_str(tiny_tokenizer().decode())
TOKENS = decoder_of(TOKENIZER)


def decoded(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


def streamed(decoder: TokenDecoder, token_ids: list[int]) -> str:
    stream = TextStream(decoder)
    return "".join([stream.step(token_id) for token_id in token_ids]) + stream.flush()


@given(st.text(max_size=40))
def test_streamed_text_is_whole_text(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert streamed(TOKENS, ids) == decoded(TOKENIZER, ids)


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=MAX_HELD_TOKENS - 1))
def test_any_token_split_gives_whole_text(ids: list[int]) -> None:
    assert streamed(TOKENS, ids) == decoded(TOKENIZER, ids)


BYTES = load_tokenizer(byte_fallback_tokenizer())
BYTE_TOKENS = load_decoder(byte_fallback_tokenizer())


@given(st.text("abhelo é🔥", max_size=30))
def test_other_decoders_keep_spaces_and_bytes(text: str) -> None:
    ids = BYTES.encode(text).ids
    assert streamed(BYTE_TOKENS, ids) == decoded(BYTES, ids)


def test_special_tokens_have_no_text() -> None:
    eos = TOKENIZER.token_to_id(EOS)
    assert eos is not None
    ids = [eos, *TOKENIZER.encode("hello").ids, eos]
    assert streamed(TOKENS, ids) == "hello"


def test_endless_invalid_bytes_are_flushed() -> None:
    """A model gone wrong must not make each step dearer than the one before."""
    invalid = TOKENIZER.token_to_id("ÿ")  # the byte 0xff
    assert invalid is not None
    stream = TextStream(TOKENS)
    text = "".join([stream.step(invalid) for _ in range(MAX_HELD_TOKENS * 10)])
    assert text == "\ufffd" * MAX_HELD_TOKENS * 10
    assert "".join([stream.step(token) for token in TOKENIZER.encode(" hello").ids]) == " hello"


def test_decoder_panic_is_error_with_cause() -> None:
    """A panic of the library is no ``Exception``: uncaught it would end neither the request nor anything else."""
    tokenizer, decoder = load_tokenizer(panicking_tokenizer()), load_decoder(panicking_tokenizer())
    fine, panic = tokenizer.token_to_id("h"), tokenizer.token_to_id(PANIC)
    assert fine is not None and panic is not None
    for checked in (TextStream(decoder), StopChecker(decoder, ["STOP"])):
        checked.step(fine)
        with pytest.raises(TorchrelayError, match="the model's tokenizer failed to decode its tokens") as failed:
            checked.step(panic)
        assert failed.value.field == "model"


def test_panic_on_held_tokens_is_error() -> None:
    """A character that never ends is decoded anew at the end of the stream."""
    fields = json.loads(panicking_tokenizer())
    fields["decoder"]["decoders"].reverse()  # strips the text of all tokens, which is now empty
    fields["decoder"]["decoders"][1]["content"] = "\ufffd"
    invalid = TOKENIZER.token_to_id("ÿ")  # the byte 0xff
    assert invalid is not None
    stream = TextStream(load_decoder(json.dumps(fields).encode()))
    with pytest.raises(TorchrelayError, match="failed to decode"):
        stream.step(invalid)
        stream.flush()


def test_long_tokens_without_text_are_flushed() -> None:
    """Each step decodes all that is held: sixteen tokens of a thousand characters would make steps slow."""
    fields = json.loads(tiny_tokenizer())
    fields["model"] = {"type": "WordLevel", "vocab": {"ÿ" * 200: 0, "h": 1}, "unk_token": "h"}
    fields["added_tokens"] = []
    stream = TextStream(load_decoder(json.dumps(fields).encode()))
    assert [stream.step(0), stream.step(0), stream.step(1)] == ["", "\ufffd" * 400, "h"]
