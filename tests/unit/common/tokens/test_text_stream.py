"""Text decoded token by token equals the text decoded at once, up to a stop string."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.sample_tokenizers import (
    PANIC,
    byte_fallback_tokenizer,
    panicking_tokenizer,
    tiny_tokenizer,
)
from tests.support.token_decoders import decoder_of
from torchrelay.common.errors import TorchrelayError
from torchrelay.common.tokens.stop_strings import StopChecker, StopTrimmer
from torchrelay.common.tokens.text_stream import MAX_HELD_TOKENS, TextStream, prompt_end
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer
from torchrelay.gateway.inference.text.detokenizer import ChoiceDetokenizer

TOKENIZER = Tokenizer.from_str(tiny_tokenizer().decode())
TOKENS = decoder_of(TOKENIZER)


def decoded(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


BYTES = load_tokenizer(byte_fallback_tokenizer())
BYTE_TOKENS = load_decoder(byte_fallback_tokenizer())


def answered(decoder: TokenDecoder, prompt: list[int], answer: list[int]) -> str:
    """The text of an answer, by the tokens of the prompt that the stream asks for."""
    stream = TextStream(decoder, prompt_end(decoder, prompt))
    return "".join([stream.step(token_id) for token_id in answer]) + stream.flush()


def continued(tokenizer: Tokenizer, ids: list[int], num_prompt_tokens: int) -> str:
    """The text of all ``ids`` without the complete characters of the prompt."""
    prefixes = (decoded(tokenizer, ids[:end]) for end in range(num_prompt_tokens, -1, -1))
    return decoded(tokenizer, ids).removeprefix(next(prefix for prefix in prefixes if "\ufffd" not in prefix))


@given(text=st.text("abhelo é🔥", max_size=30), place=st.floats(0, 1))
@example(text="hello hello", place=0.5)  # between words
@example(text="hello  he", place=0.6)
@example(text="a🔥b", place=0.5)  # within a character
@example(text="🔥" * 9, place=0.9)  # the beginning of the prompt's end is within a character too
@pytest.mark.parametrize(("tokenizer", "decoder"), [(TOKENIZER, TOKENS), (BYTES, BYTE_TOKENS)])
def test_text_continues_prompt(tokenizer: Tokenizer, decoder: TokenDecoder, text: str, place: float) -> None:
    ids = tokenizer.encode(text).ids
    num_prompt_tokens = round(place * len(ids))
    prompt, answer = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
    assert answered(decoder, prompt, answer) == continued(tokenizer, ids, num_prompt_tokens)


def test_space_after_special_tokens_is_kept() -> None:
    """Chats end with special tokens, which have no text; the text before them counts."""
    end = BYTES.token_to_id("<s>")
    assert end is not None
    hello = BYTES.encode("hello").ids
    assert answered(BYTE_TOKENS, [*hello, *[end] * 9], hello) == " hello"
    assert answered(BYTE_TOKENS, [end], hello) == "hello"  # as the library decodes both together


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ("<0xE2><0x82>", "<0xAC>", "€"),  # the prompt's bytes are a part of the answer's first character
        ("<0xE2><0x82>", "a", "a"),  # they are no character, and belong to the prompt's text
        ("<0xE2><0x82>", "<0xE2><0x82>", "\ufffd\ufffd"),
        ("<0xE2><0x82>", "", ""),
    ],
)
def test_incomplete_character_at_end_of_prompt(prompt: str, answer: str, text: str) -> None:
    def ids(spelling: str) -> list[int]:
        found = [BYTES.token_to_id(piece) for piece in re.findall("<0x..>|.", spelling)]
        return [token_id for token_id in found if token_id is not None]

    assert answered(BYTE_TOKENS, ids(prompt), ids(answer)) == text


@given(prompt=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40))
def test_end_of_prompt_is_short(prompt: list[int]) -> None:
    """Workers get it with each request that has stop strings, whatever the prompt."""
    end = prompt_end(TOKENS, prompt)
    assert len(end) <= 12 and set(end) <= set(prompt)


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


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, the longer one of two: by trying every prefix."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(st.text("abc", max_size=4), max_size=10), stop_lists)
def test_any_text_split_ends_before_stop_string(pieces: list[str], stops: list[str]) -> None:
    trimmer, text, shown = StopTrimmer(stops), "", ""
    for piece in pieces:
        text += piece
        shown += trimmer.push(piece)
        whole = cut(text, stops)
        assert whole.startswith(shown)
        assert bool(trimmer.matched) == any(stop in text for stop in stops)
        held = whole[len(shown) :]
        if trimmer.matched:
            assert held == ""
        else:  # never more than needed: what is held may yet become a stop
            assert held == "" or any(stop.startswith(held) for stop in stops)
    assert shown + trimmer.flush() == cut(text, stops)


@given(
    prompt=st.text("ab STOP\n🔥", max_size=10),
    text=st.text("ab STOP\n🔥", max_size=30),
    stops=st.lists(st.text("ab STOP\n🔥", min_size=1, max_size=5), max_size=3),
)
def test_checker_and_trimmer_agree_on_final_token(prompt: str, text: str, stops: list[str]) -> None:
    end = prompt_end(TOKENS, TOKENIZER.encode(prompt).ids)
    checker, stream, trimmer = StopChecker(TOKENS, stops, end), TextStream(TOKENS, end), StopTrimmer(stops)
    for token_id in TOKENIZER.encode(text).ids:
        trimmer.push(stream.step(token_id))
        assert checker.step(token_id) == bool(trimmer.matched)


@given(
    text=st.text("ab STOP", max_size=30),
    stops=st.lists(st.text("ab STOP", min_size=1, max_size=3), min_size=1, max_size=2),
    min_tokens=st.integers(0, 12),
)
def test_first_tokens_are_not_searched(text: str, stops: list[str], min_tokens: int) -> None:
    """The checker stops at the same token as one that only sees the tokens from ``min_tokens`` on; so does the text."""
    ids = TOKENIZER.encode(text).ids
    checker, later = StopChecker(TOKENS, stops, (), min_tokens), StopChecker(TOKENS, stops)
    shown, trimmed = (
        ChoiceDetokenizer(TOKENS, (), stops, (), min_tokens=min_tokens),
        ChoiceDetokenizer(TOKENS, (), stops, ()),
    )
    for place, token_id in enumerate(ids):
        if place < min_tokens:
            assert not checker.step(token_id)
            assert shown.step(token_id) == TOKENIZER.decode([token_id]) and not shown.stop_string
        else:
            assert checker.step(token_id) == later.step(token_id)
            assert shown.step(token_id) == trimmed.step(token_id)
            assert shown.stop_string == trimmed.stop_string


def test_space_after_prompt_is_part_of_stop_string() -> None:
    tokenizer, decoder = load_tokenizer(byte_fallback_tokenizer()), load_decoder(byte_fallback_tokenizer())
    hello = tokenizer.encode("hello").ids
    with_prompt = StopChecker(decoder, [" he"], prompt_end(decoder, hello))
    without_prompt = StopChecker(decoder, [" he"])
    assert with_prompt.step(hello[0]) and not without_prompt.step(hello[0])
