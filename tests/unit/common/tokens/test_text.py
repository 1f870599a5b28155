"""Tokens into text, and where a stop string ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from tests.support.sample_tokenizers import EOS, SENTENCES, large_tokenizer, tiny_tokenizer
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.tokens.text import MAX_HELD_TOKENS, StopChecker, StopTrimmer, TextStream, load_tokenizer

TINY = tiny_tokenizer()
TOKENIZER = Tokenizer.from_str(TINY.decode())


def byte_fallback_tokenizer() -> bytes:
    """A BPE as SentencePiece makes them: spaces as U+2581, bytes as <0x..>, a decoder that strips the first space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlo", "he", "▁he", "ll", "llo"]
    merges = [("h", "e"), ("▁", "he"), ("l", "l"), ("ll", "o")]
    model = BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer.to_str().encode()


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
def test_loading_in_parts_gives_the_same_tokenizer(encoded: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(encoded)
    whole = Tokenizer.from_str(encoded.decode())
    for loaded in (load_tokenizer(encoded), load_tokenizer(path)):
        assert json.loads(loaded.to_str()) == json.loads(whole.to_str())
        for text in (*SENTENCES, f"a {EOS}<s> b<tool>", "hello ello  hé"):
            assert loaded.encode(text).ids == whole.encode(text).ids


def test_a_token_with_a_space_is_loaded_as_a_whole() -> None:
    vocab = {"a": 0, " ": 1, "b": 2, " b": 3, "a b": 4}
    model = BPE(vocab=vocab, merges=[(" ", "b"), ("a", " b")])
    loaded = load_tokenizer(Tokenizer(model).to_str().encode())
    assert loaded.encode("a b").ids == Tokenizer(model).encode("a b").ids == [4]


def test_another_kind_of_model_is_loaded_and_never_cuts_or_pads() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    loaded = load_tokenizer(tokenizer.to_str().encode())
    assert loaded.encode("a b a b").ids == [0, 1, 0, 1]


@pytest.mark.parametrize("encoded", [b"", b"{}", b"[1]", b"{nonsense", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_tokenizer(encoded)
    assert caught.value.field == "tokenizer.json"


def test_merges_of_a_wrong_form_are_refused() -> None:
    for merges in ([["a", "b", "c"]], [["a"]], ["ab"], [3]):
        with pytest.raises(InvalidRequest):
            load_tokenizer(with_model(TINY, merges=merges))


def test_a_large_vocabulary_takes_little_memory_at_its_peak(tmp_path: Path) -> None:
    """In a process of its own, whose peak is its own."""
    import subprocess
    import sys

    path = tmp_path / "tokenizer.json"
    path.write_bytes(large_tokenizer())
    script = (
        "import resource, sys; from pathlib import Path; from torchrelay.common.tokens.text import load_tokenizer\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); load_tokenizer(Path(sys.argv[1])); print((peak() - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, check=True)
    assert int(done.stdout) < 65


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


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, the longer one of two: by trying every prefix."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(st.text("abc", max_size=4), max_size=10), stop_lists)
def test_however_the_text_is_cut_it_ends_before_the_stop(pieces: list[str], stops: list[str]) -> None:
    trimmer, text, shown = StopTrimmer(stops), "", ""
    for piece in pieces:
        text += piece
        shown += trimmer.push(piece)
        whole = cut(text, stops)
        assert whole.startswith(shown)
        assert trimmer.stopped == any(stop in text for stop in stops)
        held = whole[len(shown) :]
        if trimmer.stopped:
            assert held == ""
        else:  # never more than needed: what is held may yet become a stop
            assert held == "" or any(stop.startswith(held) for stop in stops)
    assert shown + trimmer.flush() == cut(text, stops)


@given(st.text("ab STOP\n🔥", max_size=30), st.lists(st.text("ab STOP\n🔥", min_size=1, max_size=5), max_size=3))
def test_worker_and_gateway_agree_on_the_token_that_ends(text: str, stops: list[str]) -> None:
    checker, stream, trimmer = StopChecker(TOKENIZER, stops), TextStream(TOKENIZER), StopTrimmer(stops)
    for token_id in TOKENIZER.encode(text).ids:
        trimmer.push(stream.step(token_id))
        assert checker.step(token_id) == trimmer.stopped
