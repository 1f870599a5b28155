"""Tokens into text: loading tokenizers within little memory, incremental text, stop strings.

Worker and gateway both judge stop strings, over the same text made in the same way, so they agree on the token that
ends a choice: the worker then stops computing (``StopChecker``), the gateway cuts the text (``StopTrimmer``).
"""

from __future__ import annotations

import ctypes
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from torchrelay.common.errors import InvalidRequest

BPE_CACHE_WORDS = 4096
# A UTF-8 character takes at most four tokens of one byte; a stream that holds back more is stuck on invalid bytes, and
# would decode all it holds at every step.
MAX_HELD_TOKENS = 16

# A slice of a merges list, in either of its forms. Possessive: never slower than linear, whatever was uploaded.
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
    """The tokenizer is not of the form that the low-memory way can load."""


def load_tokenizer(source: bytes | Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json`` (its bytes, or where it lies), without truncation and padding.

    A BPE of 128,000 tokens costs 130 MB at its peak when the library reads the JSON as a whole, and 48 MB, of which it
    keeps 39, when vocabulary and merges come from files; so those are cut out of the JSON unparsed. Blocks (about a
    second); raises ``InvalidRequest``.
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
    """A tokenizer.json without vocabulary and merges, which lie in files."""

    shell: str  # the JSON of the same tokenizer with an empty model
    added_tokens: list[dict[str, Any]]
    options: dict[str, Any]
    vocab: Path
    merges: Path


def _load_in_parts(source: bytes | Path) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="torchrelay-tokenizer-") as folder:
        parts = _split(_read(source), Path(folder))  # the JSON's memory is free again when the model is built
        try:
            tokenizer = Tokenizer(
                BPE.from_file(str(parts.vocab), str(parts.merges), cache_capacity=BPE_CACHE_WORDS, **parts.options)
            )
            shell = Tokenizer.from_str(parts.shell)
        except Exception as error:  # the library raises nothing narrower; read as a whole it says what is wrong
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
    """Lines ``a b`` of a merges list, a thousand at a time. Raises ``_NotPlain`` for what lines cannot say."""
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


class TextStream:
    """The text of one choice, token by token; special tokens have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []  # tokens of the last piece: what the next piece's spacing depends on
        self._held: list[int] = []

    def step(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is unfinished."""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ):  # when a piece changes what was shown before it. NOTE: a panic of the library is no Exception
            return self.flush()
        if piece is None:
            return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""
        self._shown, self._held = self._held, []
        return piece

    def flush(self) -> str:
        """The text held back, unfinished characters as U+FFFD. The stream can go on."""
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._shown, skip_special_tokens=True)
        after = self._tokenizer.decode(self._shown + self._held, skip_special_tokens=True)
        if not after.endswith("\ufffd") and after != before:
            self._shown = self._held
        self._held = []
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=True)
        return after[len(before) :] if after.startswith(before) else after


class StopChecker:
    """Says which token completes a stop string (worker side)."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        self._text = TextStream(tokenizer)
        self._stops = tuple(stop_strings)
        self._num_kept_chars = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = ""
        self._stopped = False

    def step(self, token_id: int) -> bool:
        """True once the text up to and with ``token_id`` contains a stop string."""
        if self._stopped:
            return True
        seen = self._tail + self._text.step(token_id)
        self._stopped = any(stop in seen for stop in self._stops)
        self._tail = seen[max(0, len(seen) - self._num_kept_chars) :]
        return self._stopped


class StopTrimmer:
    """Cuts a text that comes in pieces before the stop string that is complete first (gateway side).

    Of two that are complete at the same character the longer counts. What may yet become a stop string is held back.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop_strings)
        self._num_held_most = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown now; nothing any more once ``stopped``."""
        if not self._stops or not text:
            return text
        if self.stopped:
            return ""
        seen = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return seen[: min(ends)[1]]
        num_held = self._num_held(seen)
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held]

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, seen: str) -> int:
        for num_chars in range(min(self._num_held_most, len(seen)), 0, -1):
            if any(stop.startswith(seen[-num_chars:]) for stop in self._stops):
                return num_chars
        return 0
