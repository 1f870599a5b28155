from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.token_decoders import decoder_of
from torchrelay.common.tokens.token_bytes import TokenBytes


def byte_fallback_tokenizer(*, strips: bool) -> Tokenizer:
    """Like Llama 2's (which strips the first space), Mistral's and Gemma's: a mark for spaces, and byte tokens."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "hello", "wor", "ld", "▁▁", "é"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("▁raw", normalized=False)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    pieces = ["▁hello", "▁", "wor", "ld", "é", "🔥"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "©"), ("ð", "Ł"), ("Ġ", "a")]
    vocab = {letter: i for i, letter in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_fallback_tokenizer(strips=False),
        byte_fallback_tokenizer(strips=True),
        metaspace_tokenizer(),
        byte_level_tokenizer(),
    ],
    ids=["byte fallback", "stripped", "metaspace", "byte level"],
)
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    """For random texts: the decoded text equals the concatenated bytes of its tokens."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items()}
    plain = [token for token in range(tokenizer.get_vocab_size()) if token not in special]
    tokens, rng = TokenBytes(decoder_of(tokenizer)), random.Random(7)
    num_whole = 0
    for _ in range(3000):
        ids = rng.choices(plain, k=rng.randint(1, 4))
        spelt = b"".join(map(tokens.of, ids))
        try:
            text = spelt.decode()
        except UnicodeDecodeError:
            continue
        num_whole += 1
        decoded = tokenizer.decode(ids)
        assert decoded in (text, text.removeprefix(" ")), ids
    assert num_whole > 300


def test_added_tokens_are_literal_and_unknown_ids_empty() -> None:
    tokenizer = byte_fallback_tokenizer(strips=True)
    tokens = TokenBytes(decoder_of(tokenizer))
    for spelt, meant in (("<end>", b"<end>"), ("▁raw", "▁raw".encode()), ("<0xE2>", b"\xe2")):
        token_id = tokenizer.token_to_id(spelt)
        assert token_id is not None and tokens.of(token_id) == meant
    assert tokens.of(1 << 20) == b""
    assert TokenBytes(decoder_of(Tokenizer(models.BPE({"a": 0}, [])))).of(0) == b"a"
