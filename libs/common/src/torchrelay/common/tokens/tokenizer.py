"""Loads tokenizers with little memory."""

from __future__ import annotations

import ctypes
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from torchrelay.common.errors import InvalidRequest

BPE_CACHE_WORDS = 4096

# A slice of a merges list, in either of its forms. Possessive quantifiers: linear time on any upload.
_STRING = rb'"(?:[^"\\]|\\.)*+"'
_PAIRS = re.compile(rb"(?:\s*+\[\s*+" + _STRING + rb"\s*+,\s*+" + _STRING + rb"\s*+\]\s*+,?+){1,1024}+")
_LINES = re.compile(rb"(?:\s*+" + _STRING + rb"\s*+,?+){1,1024}+")
_OPTIONS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)


class _UnsupportedTokenizer(Exception):
    """The tokenizer cannot be loaded in parts."""


def load_tokenizer(source: bytes | Path) -> Tokenizer:
    """Loads a ``tokenizer.json`` (bytes or path), without truncation and padding. Blocks for about a second.

    Raises ``InvalidRequest``. Parsed as a whole, a BPE of 128,000 tokens peaks at 130 MB; with vocabulary and merges
    cut out of the JSON unparsed and read from files, at 48 MB.
    """
    try:
        try:
            tokenizer = _load_in_parts(source)
        except _UnsupportedTokenizer:
            tokenizer = _load_whole(_read(source))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"tokenizer.json cannot be read: {error}", field="tokenizer.json") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _return_freed_memory()
    return tokenizer


def _read(source: bytes | Path) -> bytes:
    return source.read_bytes() if isinstance(source, Path) else source


def _load_whole(json_bytes: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json_bytes.decode())
    except UnicodeDecodeError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise InvalidRequest(f"tokenizer.json cannot be read: {error}", field="tokenizer.json") from error
    if isinstance(tokenizer.model, BPE):
        tokenizer.model._resize_cache(BPE_CACHE_WORDS)
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tokenizer.json whose vocabulary and merges are in files."""

    shell: str  # JSON of the same tokenizer with an empty model
    added_tokens: list[dict[str, Any]]
    options: dict[str, Any]
    vocab: Path
    merges: Path


def _load_in_parts(source: bytes | Path) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="torchrelay-tokenizer-") as folder:
        parts = _split(_read(source), Path(folder))  # the JSON is freed before the model is built
        try:
            tokenizer = Tokenizer(
                BPE.from_file(str(parts.vocab), str(parts.merges), cache_capacity=BPE_CACHE_WORDS, **parts.options)
            )
            shell = Tokenizer.from_str(parts.shell)
        except Exception as error:  # the library raises nothing narrower; loading it whole explains the error
            raise _UnsupportedTokenizer from error
    tokenizer.normalizer = shell.normalizer
    tokenizer.pre_tokenizer = shell.pre_tokenizer
    tokenizer.post_processor = shell.post_processor
    tokenizer.decoder = shell.decoder
    _add_tokens(tokenizer, parts.added_tokens)
    return tokenizer


def _split(json_bytes: bytes, folder: Path) -> _Parts:
    fields = msgspec.json.decode(json_bytes, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(fields.get("model", b"null"), type=dict[str, msgspec.Raw] | None) or {}
    if msgspec.json.decode(model.get("type", b"null")) != "BPE" or "vocab" not in model or "merges" not in model:
        raise _UnsupportedTokenizer
    options = {name: msgspec.json.decode(model[name]) for name in _OPTIONS if name in model}
    kept: dict[str, Any] = {name: raw for name, raw in fields.items() if name not in ("model", "added_tokens")}
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    parts = _Parts(
        shell=msgspec.json.encode({**kept, "added_tokens": [], "model": empty}).decode(),
        added_tokens=msgspec.json.decode(fields.get("added_tokens", b"[]")),
        options={name: value for name, value in options.items() if value is not None},
        vocab=folder / "vocab.json",
        merges=folder / "merges.txt",
    )
    parts.vocab.write_bytes(model["vocab"])
    with parts.merges.open("wb") as file:
        file.writelines(_merge_lines(model["merges"]))
    return parts


def _merge_lines(merges: msgspec.Raw) -> Iterator[bytes]:
    """Lines ``a b`` of a merges list, a thousand at a time. Raises ``_UnsupportedTokenizer``."""
    data = memoryview(merges)
    begin = 1
    form: Any = list[tuple[str, str]] if _PAIRS.match(data, begin) else list[str]
    pattern = _LINES if form is list[str] else _PAIRS
    while (found := pattern.match(data, begin)) is not None:
        part = msgspec.json.decode(b"[" + found[0].rstrip().rstrip(b",") + b"]", type=form)
        lines = part if form is list[str] else [f"{left} {right}" for left, right in part]
        if any(line.count(" ") != 1 or line.startswith("#version") for line in lines):
            raise _UnsupportedTokenizer
        text = "\n".join(lines) + "\n"
        if text.count("\n") != len(lines) or "\r" in text:
            raise _UnsupportedTokenizer
        yield text.encode()
        begin = found.end()
    if bytes(data[begin:]).strip() != b"]":
        raise _UnsupportedTokenizer


def _add_tokens(tokenizer: Tokenizer, added: list[dict[str, Any]]) -> None:
    for entry in sorted(added, key=lambda entry: int(entry["id"])):
        flags = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        token = AddedToken(entry["content"], special=entry.get("special", False), **flags)
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
        if tokenizer.token_to_id(entry["content"]) != entry["id"]:
            raise _UnsupportedTokenizer


def _return_freed_memory() -> None:
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from musl
        if trim is not None:
            trim(0)
