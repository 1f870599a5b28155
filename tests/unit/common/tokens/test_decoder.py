"""A tokenizer loaded to decode gives the text that the whole tokenizer gives."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from tests.support.peak_memory import held_kb, peak_kb
from tests.support.sample_tokenizers import byte_fallback_tokenizer, large_tokenizer, tiny_tokenizer
from tests.support.token_decoders import decoder_of
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.tokens import token_decoder, tokenizer, tokenizer_document
from torchrelay.common.tokens.text_stream import MAX_HELD_TOKENS, TextStream
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.common.tokens.tokenizer import load_decoder, load_tokenizer
from torchrelay.common.tokens.tokenizer_limits import MAX_ADDED_TOKENS, MAX_ADDED_TOKENS_CHARS, MAX_VOCABULARY_ENTRIES


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
    """Texts of the library's stream by token, up to the first token that changes the text before it."""
    stream, pieces = DecodeStream(skip_special_tokens=True), list[str]()
    for token_id in ids:
        try:
            pieces.append(stream.step(tokenizer, token_id) or "")
        except Exception:
            break
    return pieces


class LibraryStream:
    """The expected output of ``TextStream``, from ids that the library decodes together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self.shown: list[int] = []
        self.held: list[int] = []

    def step(self, token_id: int) -> str:
        token = self.tokenizer.id_to_token(token_id)
        if token is None or token in self.special:
            return ""
        self.held.append(token_id)
        before, after = self.texts()
        is_stuck = len(self.held) == MAX_HELD_TOKENS
        is_incomplete = len(after) <= len(before) or after.endswith("\ufffd")
        return "" if is_incomplete and not is_stuck else self.flush()

    def flush(self) -> str:
        before, after = self.texts()
        if self.held and after != before and not after.endswith("\ufffd"):
            self.shown = self.held
        self.held = []
        return after.removeprefix(before)

    def texts(self) -> tuple[str, str]:
        shown, both = (
            decoded(self.tokenizer, ids, skip_special_tokens=True) for ids in (self.shown, self.shown + self.held)
        )
        return shown, both


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=40)
@given(data=st.data())
def test_decoder_matches_tokenizer(name: str, data: st.DataObject) -> None:
    whole, decoder = LOADED[name]
    ids = data.draw(st.lists(st.integers(0, whole.get_vocab_size() + 2), max_size=20))
    for skip in (True, False):
        assert decoder.decode(ids, skip_special_tokens=skip) == decoded(whole, ids, skip_special_tokens=skip)
    stream, library = TextStream(decoder), LibraryStream(whole)
    pieces = [stream.step(token_id) for token_id in ids]
    assert pieces == [library.step(token_id) for token_id in ids]
    assert stream.flush() == library.flush()
    expected = streamed(whole, ids[: MAX_HELD_TOKENS - 1])
    assert pieces[: len(expected)] == expected


@pytest.mark.parametrize("name", SAMPLES)
def test_tokens_have_same_names_and_bytes(name: str) -> None:
    whole, decoder = LOADED[name]
    added = whole.get_added_tokens_decoder()
    expected, actual = TokenBytes(decoder_of(whole)), TokenBytes(decoder)
    for token_id in range(-1, whole.get_vocab_size() + 2):
        assert decoder.spelling(token_id) == (whole.id_to_token(token_id) if token_id >= 0 else None)
        assert decoder.declared(token_id) == (added[token_id].content if token_id in added else None)
        assert actual.of(token_id) == expected.of(token_id)


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
    added_per_slice=st.integers(1, 3),
)
@example(
    vocabulary=[("", 0)],
    added=[{"content": "", "special": True, "normalized": False, "id": 0}],
    decoder=None,
    normalizer=None,
    ids=[0, 0],
    added_per_slice=1,
)
@example(
    vocabulary=[("a", 0)],
    added=[{"content": "A", "special": False, "normalized": normalized, "id": 1} for normalized in (False, True)],
    decoder=None,
    normalizer={"type": "Lowercase"},
    ids=[1],
    added_per_slice=1,
)
@example(  # the vocabulary has two tokens, so the first that is new gets the id of its second
    vocabulary=[("a", 0), ("A", 2)],
    added=[
        {"content": "B", "special": False, "normalized": True, "id": 0},
        {"content": "A", "special": False, "normalized": False, "id": 0},
    ],
    decoder=None,
    normalizer={"type": "Lowercase"},
    ids=[2],
    added_per_slice=1,
)
def test_unusual_ids_decode_as_in_library(
    vocabulary: list[Any], added: list[Any], decoder: Any, normalizer: Any, ids: list[int], added_per_slice: int
) -> None:
    if isinstance(vocabulary[0], str):
        model: dict[str, Any] = {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.0] for token in vocabulary]}
    else:
        model = {"type": "WordLevel", "unk_token": "a", "vocab": dict(vocabulary)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    fields = {"added_tokens": [token | flags for token in added], "normalizer": normalizer, "decoder": decoder}
    encoded = json.dumps(fields | {"model": model}).encode()
    whole = load_tokenizer(encoded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "ADDED_TOKENS_PER_SLICE", added_per_slice)
        loaded = load_decoder(encoded)
    for skip in (True, False):
        assert loaded.decode(ids, skip_special_tokens=skip) == decoded(whole, ids, skip_special_tokens=skip)
    declared = whole.get_added_tokens_decoder()
    for token_id in ids:
        assert loaded.spelling(token_id) == whole.id_to_token(token_id)
        assert loaded.declared(token_id) == (declared[token_id].content if token_id in declared else None)


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_id_beyond_library_range_is_refused(token_id: int) -> None:
    fields = json.loads(SAMPLES["wordlevel"])
    fields["model"]["vocab"]["x"] = token_id
    with pytest.raises(InvalidRequest, match="is not a token"):
        load_decoder(json.dumps(fields).encode())


NUM_TOKENS = MAX_VOCABULARY_ENTRIES // 8


def with_far_ids(num_tokens: int) -> bytes:
    """In an order that is not theirs."""
    vocab = {f"{index:x}": (1 << 20) + index * 1_000_003 % (1 << 30) for index in range(num_tokens)}
    fields = {"model": {"type": "WordLevel", "unk_token": "0", "vocab": vocab}}
    return json.dumps(fields, separators=(",", ":")).encode()


def with_empty_tokens(num_tokens: int) -> bytes:
    return json.dumps({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["", 0]] * num_tokens}}).encode()


def with_many_added_tokens() -> bytes:
    """The allowed number of added tokens, of the longest spelling that fits."""
    fields = json.loads(large_tokenizer(NUM_TOKENS))
    size, num_chars = len(fields["model"]["vocab"]), MAX_ADDED_TOKENS_CHARS // MAX_ADDED_TOKENS
    fields["added_tokens"] = [
        {"id": size + index, "content": f"<{index:>{num_chars - 2}}>", "special": index % 2 == 0}
        for index in range(MAX_ADDED_TOKENS)
    ]
    return json.dumps(fields).encode()


ARENA_KB = 1024  # the interpreter gives memory back only in pieces of this size
HOSTILE = {
    "far ids": lambda: with_far_ids(NUM_TOKENS),
    "empty tokens": lambda: with_empty_tokens(NUM_TOKENS),  # of the fewest bytes
    "added tokens": with_many_added_tokens,
}


# Large enough that the interpreter's pieces of memory are small beside them.
LARGE_HOSTILE = HOSTILE | {
    "far ids": lambda: with_far_ids(4 * NUM_TOKENS),
    "empty tokens": lambda: with_empty_tokens(MAX_VOCABULARY_ENTRIES),
}


@pytest.mark.parametrize("name", LARGE_HOSTILE)
def test_decoder_memory_matches_count_and_file(name: str, tmp_path: Path) -> None:
    """Caches go by it. One tenant's far ids used to take eight times their file."""
    encoded = LARGE_HOSTILE[name]()
    path = tmp_path / "tokenizer.json"
    path.write_bytes(encoded)
    each_kb = held_kb("load_decoder", path)
    assert each_kb < 1.2 * len(encoded) / 1024
    assert each_kb < 1.2 * load_decoder(encoded).num_bytes / 1024 + ARENA_KB


@pytest.mark.parametrize("name", ["large", *HOSTILE])
def test_loading_works_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run between slices: the library, the JSON parser and ``sorted`` hold the interpreter in a call."""
    num_members: list[int] = []
    num_added: list[int] = []
    num_unsorted: list[int] = []
    decode_json, make_tokenizer = tokenizer_document.decode_json, tokenizer._tokenizer

    def decode(encoded: Any, form: Any, field: str) -> Any:
        decoded = decode_json(encoded, form, field)
        if field in ("model.vocab", "model.merges"):
            num_members.append(len(decoded))
        return decoded

    def make(model: Any, document: Any, *, decodes_only: bool) -> Any:
        num_added.append(len(document.added_tokens))
        return make_tokenizer(model, document, decodes_only=decodes_only)

    def sort(ids: list[int]) -> list[int]:
        num_runs = 1 + sum(following < before for before, following in pairwise(ids))
        num_unsorted.append(len(ids) if num_runs > 2 else 0)  # two runs are merged in linear time
        return sorted(ids)

    monkeypatch.setattr(tokenizer_document, "decode_json", decode)
    monkeypatch.setattr(tokenizer, "_tokenizer", make)
    monkeypatch.setattr(token_decoder, "sorted", sort, raising=False)
    load_decoder(HOSTILE[name]() if name in HOSTILE else large_tokenizer(NUM_TOKENS))
    assert 0 < max(num_members) <= 1024
    assert num_added and max(num_added) <= tokenizer.ADDED_TOKENS_PER_SLICE
    assert num_unsorted and max(num_unsorted) <= 1 << 13


def test_decoder_compiles_no_pattern() -> None:
    """Not even one that the library refuses. A token that it should normalize is spelt as declared."""
    fields = json.loads(SAMPLES["bpe"])
    fields["pre_tokenizer"]["pattern"] = {"Regex": "("}
    lowercase, replace = {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [lowercase, replace]}
    tool = LOADED["bpe"][0].token_to_id("<Tool>")
    assert tool is not None
    assert load_decoder(json.dumps(fields).encode()).decode([12, tool, 12]) == "|<Tool>|"


def test_peaks_of_memory_are_low_and_that_of_the_decoder_lower(tmp_path: Path) -> None:
    """Each in a process of its own."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(large_tokenizer())
    decoder_kb, whole_kb = (peak_kb(load, path) for load in ("load_decoder", "load_tokenizer"))
    assert 20 * 1024 < whole_kb < 65 * 1024
    assert decoder_kb < min(0.8 * whole_kb, 40 * 1024)
