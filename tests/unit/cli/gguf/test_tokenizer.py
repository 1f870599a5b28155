"""The tokenizer of a GGUF file gives the ids of the one that it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.checkpoints import CHAT_TEMPLATE
from tests.support.sample_tokenizers import SENTENCES, byte_fallback_tokenizer, tiny_tokenizer
from tests.unit.cli.gguf.gguf_files import tokenizer_metadata
from torchrelay.cli.errors import CliError
from torchrelay.cli.gguf.header import GgufHeader
from torchrelay.cli.gguf.tokenizer import tokenizer_files

TEXTS = (*SENTENCES, "", "  two  spaces", "12345 it's 6\n\n7", "he hello ▁ bell", "a\tb\r\n c")


def files_of(metadata: dict[str, Any]) -> dict[str, Any]:
    return tokenizer_files(GgufHeader(Path("model.gguf"), metadata, {}))


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(files_of(metadata)["tokenizer.json"]))


def byte_level(tmp_path: Path, **values: Any) -> dict[str, Any]:
    """The metadata of a trained byte-level tokenizer."""
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    metadata = tokenizer_metadata(tmp_path)
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_byte_level_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    own, other = tokenizer_of(byte_level(tmp_path)), Tokenizer.from_str(tiny_tokenizer().decode())
    for text in TEXTS:
        assert own.encode(text).ids == other.encode(text).ids
        assert own.decode(own.encode(text).ids) == other.decode(other.encode(text).ids)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["Ġ2026", "Ġit", "'", "S"]),
        ("smollm", ["Ġ", "2", "0", "2", "6", "Ġit", "'", "S"]),
        ("llama-bpe", ["Ġ", "202", "6", "Ġit", "'S"]),
        ("qwen2", ["Ġ", "2", "0", "2", "6", "Ġit", "'S"]),
    ],
)
def test_words_are_split_as_the_file_says(tmp_path: Path, name: str, words: list[str]) -> None:
    split = tokenizer_of(byte_level(tmp_path, pre=name)).pre_tokenizer
    assert [word for word, _ in split.pre_tokenize_str(" 2026 it'S")] == words


@pytest.mark.parametrize(
    ("name", "values", "added"),
    [
        ("gpt-2", {}, (0, 0)),
        ("gpt-2", {"add_bos_token": True}, (1, 0)),
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"add_bos_token": False, "add_eos_token": True}, (0, 1)),
    ],
)
def test_tokens_are_added_as_the_file_says(
    tmp_path: Path, name: str, values: dict[str, Any], added: tuple[int, int]
) -> None:
    tokenizer = tokenizer_of(byte_level(tmp_path, pre=name, bos_token_id=7, eos_token_id=8, **values))
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == [7] * added[0] + plain + [8] * added[1]


def test_sentence_pieces_are_joined_by_score() -> None:
    document = json.loads(byte_fallback_tokenizer())
    vocab: dict[str, int] = document["model"]["vocab"]
    tokens = {number: token for token, number in vocab.items()}
    tokens |= {token["id"]: token["content"] for token in document["added_tokens"]}
    rank = {"".join(pair): float(-place) for place, pair in enumerate(document["model"]["merges"])}
    kinds = {"<unk>": 2, "<s>": 3, "<tool>": 4} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [tokens[number] for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [kinds.get(tokens[number], 1) for number in range(len(tokens))],
        "tokenizer.ggml.scores": [rank.get(tokens[number], -1000.0) for number in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": vocab.get("<s>", len(vocab)),
    }
    own, other = tokenizer_of(metadata), Tokenizer.from_str(byte_fallback_tokenizer().decode())
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ids == other.encode(text).ids
        assert own.decode(ids) == other.decode(ids)
    assert own.encode("he").ids[0] == metadata["tokenizer.ggml.bos_token_id"]


def test_template_and_ends_are_kept(tmp_path: Path) -> None:
    files = files_of(byte_level(tmp_path, eos_token_id=5, eot_token_id=6))
    assert files["chat_template.jinja"] == CHAT_TEMPLATE
    assert files["generation_config.json"] == {"eos_token_id": [5, 6]}
    vocab = files["tokenizer.json"]["model"]["vocab"]
    assert vocab[files["tokenizer_config.json"]["eos_token"]] == 5


def test_tokens_that_make_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a megabyte of a hostile file made half a million pairs."""
    monkeypatch.setattr("torchrelay.cli.gguf.tokenizer._MAX_MERGES", 100)
    tokens = ["a" * length for length in range(1, 40)]
    metadata = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)}
    with pytest.raises(CliError, match="more than 100 pairs of them make another"):
        files_of({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
