"""Loads tokenizers with little memory."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Model, WordLevel

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.tokens.tokenizer_document import (
    TokenizerDocument,
    decode_json,
    read_tokenizer,
)
from torchrelay.common.tokens.tokenizer_limits import TokenizerRefused

BPE_CACHE_WORDS = 4096

_OPTIONS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
_VOCAB, _MERGES = "vocab.json", "merges.txt"


class _UnsupportedTokenizer(Exception):
    """The tokenizer cannot be loaded in parts."""


def load_tokenizer(source: bytes | Path, *, has_disk: bool = True) -> Tokenizer:
    """Loads a ``tokenizer.json`` (bytes or path), without truncation and padding. Blocks for about a second.

    Its patterns are the tenant's: encode only in a process that can be killed. Raises ``InvalidRequest``. Parsed as a
    whole, a BPE of 128,000 tokens peaks at 130 MB; with vocabulary and merges cut out of the JSON unparsed and read
    from files, at 50 MB; ``has_disk`` is False where temporary files cannot be written.
    """
    return _load(source, lambda read: _load_complete(read, has_disk))


def load_decoder(source: bytes | Path) -> Tokenizer:
    """Loads vocabulary, added tokens and decoder of a ``tokenizer.json``: what turns token ids into text.

    No pattern of the tenant's is compiled. Without merges and pre-tokenizer it must not encode. Its text is that of
    ``load_tokenizer``'s, except for added tokens that a pattern would have to normalize: they are spelt as declared.
    Takes and raises what ``load_tokenizer`` does; other threads wait for it for a tenth of a second at most.
    """
    return _load(source, _load_decoding)


def _load(source: bytes | Path, load: Callable[[Callable[[], TokenizerDocument]], Tokenizer]) -> Tokenizer:
    try:
        tokenizer = load(lambda: read_tokenizer(source.read_bytes() if isinstance(source, Path) else source))
    except TokenizerRefused as refused:
        raise InvalidRequest(f"tokenizer.json: {refused}", field="tokenizer.json") from refused
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _return_freed_memory()
    return tokenizer


def _load_complete(read: Callable[[], TokenizerDocument], has_disk: bool) -> Tokenizer:
    if has_disk:
        with tempfile.TemporaryDirectory(prefix="torchrelay-tokenizer-") as folder, suppress(_UnsupportedTokenizer):
            shell = _split(read(), Path(folder))  # the JSON is freed before the model is built
            return _load_in_parts(shell, Path(folder))
    return _load_whole(read(), decodes_only=False)


def _load_decoding(read: Callable[[], TokenizerDocument]) -> Tokenizer:
    with suppress(_UnsupportedTokenizer):
        shell, vocabulary = _vocabulary(read())  # the JSON is freed before the model is built
        # Any model decodes alike, and this one is built fastest. The library holds the interpreter's lock meanwhile.
        with _failures_as_unsupported():
            model = WordLevel(vocabulary, unk_token="")
            vocabulary.clear()
            return _with_model(shell, model, decodes_only=True)
    return _load_whole(read(), decodes_only=True)


def _vocabulary(document: TokenizerDocument) -> tuple[TokenizerDocument, dict[str, int]]:
    """The document without its model, and ids by token."""
    vocabulary: dict[str, int] = {}
    for part in document.vocabulary():
        vocabulary.update(part)
    return replace(document, model={}), vocabulary


def _load_whole(document: TokenizerDocument, decodes_only: bool) -> Tokenizer:
    model: dict[str, Any] = dict(document.model)
    if document.model_type == "BPE":
        model |= {"type": "BPE", "dropout": None}
        if decodes_only:
            model["merges"] = []
    try:
        with _panics_as_errors():
            tokenizer = Tokenizer.from_str(document.encode(model, decodes_only=decodes_only))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerRefused("", f"it cannot be read: {error}") from error
    if isinstance(tokenizer.model, BPE):
        tokenizer.model._resize_cache(BPE_CACHE_WORDS)
    return tokenizer


def _load_in_parts(document: TokenizerDocument, folder: Path) -> Tokenizer:
    """A BPE from the files of ``_split``. Raises ``_UnsupportedTokenizer``."""
    options = {name: decode_json(document.model[name], Any, name) for name in _OPTIONS if name in document.model}
    with _failures_as_unsupported():
        model = BPE.from_file(
            str(folder / _VOCAB),
            str(folder / _MERGES),
            cache_capacity=BPE_CACHE_WORDS,
            **{name: value for name, value in options.items() if value is not None},
        )
        return _with_model(document, model, decodes_only=False)


def _with_model(document: TokenizerDocument, model: Model, *, decodes_only: bool) -> Tokenizer:
    """The tokenizer with ``model`` in place of the document's."""
    _check_ids(document, model)
    # The library adds tokens one by one in quadratic time unless it reads them from JSON, and their ids depend on the
    # model's vocabulary. Hence a model of just these tokens, replaced once they are added.
    added = {token.content: token.id for token in document.added_tokens}
    stand_in = {"type": "WordLevel", "vocab": added, "unk_token": ""}
    tokenizer = Tokenizer.from_str(document.encode(stand_in, decodes_only=decodes_only))
    tokenizer.model = model
    return tokenizer


@contextmanager
def _failures_as_unsupported() -> Iterator[None]:
    """Whatever the library raises, nothing narrower than ``Exception``: loading the whole explains the error."""
    try:
        with _panics_as_errors():
            yield
    except Exception as error:
        raise _UnsupportedTokenizer from error


def _check_ids(document: TokenizerDocument, model: Model) -> None:
    """Raises ``_UnsupportedTokenizer`` unless the library would give the added tokens the ids in the file."""
    highest, contents = Tokenizer(model).get_vocab_size() - 1, set[str]()
    for token in document.added_tokens:
        known = model.token_to_id(token.content)
        expected = highest + 1 if known is None else known
        if expected != token.id or not token.content or token.content in contents:
            raise _UnsupportedTokenizer
        highest = max(highest, expected)
        contents.add(token.content)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Makes a panic of the library, which is no ``Exception``, one."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise RuntimeError(f"the tokenizers library panicked: {panic}") from panic


def _split(document: TokenizerDocument, folder: Path) -> TokenizerDocument:
    """Writes vocabulary and merges of a BPE into files; returns the rest. Raises ``_UnsupportedTokenizer``."""
    if document.model_type != "BPE" or "merges" not in document.model:
        raise _UnsupportedTokenizer
    (folder / _VOCAB).write_bytes(document.model["vocab"])
    with (folder / _MERGES).open("wb") as file:
        file.writelines(_lines(pairs) for pairs in document.merges())
    return replace(document, model={name: raw.copy() for name, raw in document.model.items() if name in _OPTIONS})


def _lines(pairs: list[tuple[str, str]]) -> bytes:
    """The lines of a merges file. Raises ``_UnsupportedTokenizer`` if it cannot hold these merges."""
    text = "".join([f"{left} {right}\n" for left, right in pairs])
    if text.count("\n") != len(pairs) or text.count(" ") != len(pairs) or "\r" in text or "#version" in text:
        raise _UnsupportedTokenizer
    return text.encode()


def _return_freed_memory() -> None:
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from musl
        if trim is not None:
            trim(0)
