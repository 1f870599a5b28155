"""A tokenizer loaded to decode gives the text that the whole tokenizer gives."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
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
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.tokens.text_stream import MAX_HELD_TOKENS, TextStream
from torchrelay.common.tokens.token_decoder import TokenDecoder
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
LOADED = {name: (Tokenizer.from_str(encoded.decode()), load_decoder(encoded)) for name, encoded in SAMPLES.items()}


def decoded(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return text


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What the library's stream gives for each token, as far as it comes: a token may change the text before it."""
    stream, pieces = DecodeStream(skip_special_tokens=True), list[str]()
    for token_id in ids:
        try:
            pieces.append(stream.step(tokenizer, token_id) or "")
        except Exception:
            break
    return pieces


@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
def test_the_text_is_that_of_the_whole_tokenizer(name: str, data: st.DataObject) -> None:
    whole, decoder = LOADED[name]
    ids = data.draw(st.lists(st.integers(0, whole.get_vocab_size() + 2), max_size=MAX_HELD_TOKENS - 1))
    for skip in (True, False):
        assert decoder.decode(ids, skip_special_tokens=skip) == decoded(whole, ids, skip_special_tokens=skip)
    stream, expected = TextStream(decoder), streamed(whole, ids)
    assert [stream.step(token_id) for token_id in ids[: len(expected)]] == expected


@pytest.mark.parametrize("name", SAMPLES)
def test_tokens_have_the_same_names_and_bytes(name: str) -> None:
    whole, decoder = LOADED[name]
    assert decoder.declared == {token_id: token.content for token_id, token in whole.get_added_tokens_decoder().items()}
    expected, found = TokenBytes(TokenDecoder.of(whole)), TokenBytes(decoder)
    for token_id in range(-1, whole.get_vocab_size() + 2):
        assert decoder.spelling(token_id) == (whole.id_to_token(token_id) if token_id >= 0 else None)
        assert found.of(token_id) == expected.of(token_id)


ODD = st.sampled_from(["a", "A", "b", "", "##c", "\u2581d", "\u00c3", "\u00a9", "<0xC3>", "<0xA9>", "n't", "<pad>"])
FAR = st.sampled_from([40, (1 << 32) - 1])
DECODERS: list[dict[str, Any] | None] = [
    None,
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
]


@given(
    vocabulary=st.one_of(
        st.lists(st.tuples(ODD, st.integers(0, 12) | FAR), min_size=1, max_size=9, unique_by=lambda entry: entry[1]),
        st.lists(ODD, min_size=1, max_size=9),
    ),
    added=st.lists(
        st.fixed_dictionaries(
            {"content": ODD, "special": st.booleans(), "normalized": st.booleans(), "id": st.integers(0, 20)}
        ),
        max_size=5,
    ),
    decoder=st.sampled_from(DECODERS),
    normalizer=st.sampled_from([None, {"type": "Lowercase"}]),
    ids=st.lists(st.integers(0, 24) | FAR, max_size=12),
)
def test_ids_that_collide_or_are_far_apart_and_equal_tokens_are_decoded_as_the_library_does(
    vocabulary: list[Any], added: list[Any], decoder: Any, normalizer: Any, ids: list[int]
) -> None:
    if isinstance(vocabulary[0], str):
        model: dict[str, Any] = {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.0] for token in vocabulary]}
    else:
        model = {"type": "WordLevel", "unk_token": "a", "vocab": dict(vocabulary)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    fields = {"added_tokens": [token | flags for token in added], "normalizer": normalizer, "decoder": decoder}
    encoded = json.dumps(fields | {"model": model}).encode()
    whole, loaded = load_tokenizer(encoded), load_decoder(encoded)
    for skip in (True, False):
        assert loaded.decode(ids, skip_special_tokens=skip) == decoded(whole, ids, skip_special_tokens=skip)
    for token_id in ids:
        assert loaded.spelling(token_id) == whole.id_to_token(token_id)


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_an_id_that_the_library_cannot_hold_is_refused(token_id: int) -> None:
    fields = json.loads(SAMPLES["wordlevel"])
    fields["model"]["vocab"]["x"] = token_id
    with pytest.raises(InvalidRequest, match="is not a token"):
        load_decoder(json.dumps(fields).encode())


def longest_hold_s(encoded: bytes) -> float:
    """CPU time that a load takes at most between two moments at which another thread has the interpreter."""
    loading = threading.Thread(target=load_decoder, args=(encoded,))
    loading.start()
    assert loading.ident is not None
    clock = time.pthread_getcpuclockid(loading.ident)
    last_s = longest_s = 0.0
    while loading.is_alive():
        with suppress(OSError):  # it has ended
            used_s = time.clock_gettime(clock)
            last_s, longest_s = used_s, max(longest_s, used_s - last_s)
        time.sleep(0.0005)
    return longest_s


def test_loading_lets_other_threads_run() -> None:
    """An event loop waits for them. The best of three: the machine may keep a thread waiting as well."""
    encoded = large_tokenizer()
    assert min(longest_hold_s(encoded) for _ in range(3)) < 0.05


def test_no_pattern_is_compiled() -> None:
    """Not even one that the library refuses. A token that it should normalize is spelt as declared."""
    fields = json.loads(SAMPLES["bpe"])
    fields["pre_tokenizer"]["pattern"] = {"Regex": "("}
    lowercase, replace = {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [lowercase, replace]}
    tool = LOADED["bpe"][0].token_to_id("<Tool>")
    assert tool is not None
    assert load_decoder(json.dumps(fields).encode()).decode([12, tool, 12]) == "|<Tool>|"


def test_it_takes_less_memory_than_the_whole(tmp_path: Path) -> None:
    """Each in a process of its own."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(large_tokenizer())
    decoder_kb, whole_kb = (peak_kb(load, path) for load in ("load_decoder", "load_tokenizer"))
    assert decoder_kb < 0.8 * whole_kb
    assert decoder_kb < 40 * 1024
