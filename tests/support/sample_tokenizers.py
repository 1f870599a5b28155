"""Tokenizers for tests and benchmarks: byte-level BPE, made here rather than downloaded."""

from __future__ import annotations

import json
import random

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SENTENCES = (
    "A cold start is the time from zero to the first token.",
    "The torch is handed from runner to runner, and the flame never goes out.",
    "Ein Läufer gibt die Fackel weiter; größer wird das Feuer dabei nicht. 🔥🔥",
    "STOP here. User: hello\n\nAssistant: hello, hello!",
)
EOS = "<|end|>"


def tiny_tokenizer(vocab_size: int = 420) -> bytes:
    """The ``tokenizer.json`` of a byte-level BPE of a few hundred tokens, with one special token, ``EOS``."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer.to_str().encode()


def large_tokenizer(vocab_size: int = 128_000, seed: int = 0) -> bytes:
    """The ``tokenizer.json`` of a byte-level BPE with a vocabulary of real size and random merges."""
    rng = random.Random(seed)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    letters = [token for token in tokens if token.isascii() and token.isalpha()] + ["Ġ"]
    while len(vocab) < vocab_size:
        left, right = rng.choice(letters if rng.random() < 0.5 else tokens), rng.choice(tokens)
        if len(left) + len(right) <= 12 and left + right not in vocab:
            vocab[left + right] = len(vocab)
            tokens.append(left + right)
            merges.append((left, right))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": vocab_size, "content": EOS, **added}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        },
        ensure_ascii=False,
    ).encode()


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


PANIC = "Ġ"  # the token that ``panicking_tokenizer`` cannot decode


def panicking_tokenizer() -> bytes:
    """``tiny_tokenizer`` with a decoder in which the library panics at one token, ``PANIC``."""
    fields = json.loads(tiny_tokenizer())
    # The token is stripped from both ends and has but one character.
    strip = {"type": "Strip", "content": PANIC, "start": 1, "stop": 1}
    fields["decoder"] = {"type": "Sequence", "decoders": [strip, fields["decoder"]]}
    return json.dumps(fields).encode()
