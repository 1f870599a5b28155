"""Where a stop string ends a text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.sample_tokenizers import byte_fallback_tokenizer, tiny_tokenizer
from tests.support.token_decoders import decoder_of
from torchrelay.common.tokens.stop_strings import StopChecker, StopTrimmer
from torchrelay.common.tokens.text_stream import TextStream, prompt_end
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer
from torchrelay.gateway.inference.text.detokenizer import ChoiceDetokenizer

TOKENIZER = Tokenizer.from_str(tiny_tokenizer().decode())
TOKENS = decoder_of(TOKENIZER)


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
