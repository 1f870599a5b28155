"""Loads tokenizers with little memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder
from tokenizers.models import BPE, Model

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.process.heap import trim_heap
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.common.tokens.tokenizer_document import (
    TokenizerDocument,
    decode_json,
    read_tokenizer,
)
from torchrelay.common.tokens.tokenizer_limits import TokenizerRefused
from torchrelay.common.tokens.vocabulary import added_ids, vocabulary_ids

BPE_CACHE_WORDS = 4096
ADDED_TOKENS_PER_SLICE = 1024

_OPTIONS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
_VOCAB, _MERGES = "vocab.json", "merges.txt"

T = TypeVar("T")


class _UnsupportedTokenizer(Exception):
    """The tokenizer cannot be loaded in parts."""


def load_tokenizer(source: bytes | Path, *, has_disk: bool = True) -> Tokenizer:
    """Loads a ``tokenizer.json`` (bytes or path), without truncation and padding. Blocks for about a second.

    Its patterns are the tenant's: encode only in a process that can be killed. Raises ``InvalidRequest``. Parsed as a
    whole, a BPE of 128,000 tokens peaks at 130 MB; with vocabulary and merges cut out of the JSON unparsed and read
    from files, at 50 MB; as lists, at 90 MB: ``has_disk`` is False where temporary files cannot be written.
    """
    return _load(source, lambda read: _load_complete(read, has_disk))


def load_decoder(source: bytes | Path) -> TokenDecoder:
    """Loads the decoder of a ``tokenizer.json``. No pattern of the tenant's is compiled.

    Its text is that of ``load_tokenizer``'s, except for added tokens that a pattern would have to normalize: they are
    spelt as declared. Takes and raises what ``load_tokenizer`` does; other threads run meanwhile.
    """
    return _load(source, _load_decoding)


def _load(source: bytes | Path, load: Callable[[Callable[[], TokenizerDocument]], T]) -> T:
    try:
        loaded = load(lambda: read_tokenizer(source.read_bytes() if isinstance(source, Path) else source))
    except TokenizerRefused as refused:
        raise InvalidRequest(f"tokenizer.json: {refused}", field="tokenizer.json") from refused
    trim_heap()
    return loaded


def _load_complete(read: Callable[[], TokenizerDocument], has_disk: bool) -> Tokenizer:
    tokenizer: Tokenizer | None = None
    with suppress(_UnsupportedTokenizer):
        tokenizer = _load_from_files(read) if has_disk else _load_from_lists(read)
    if tokenizer is None:
        tokenizer = _load_whole(read())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_from_files(read: Callable[[], TokenizerDocument]) -> Tokenizer:
    """A BPE. Raises ``_UnsupportedTokenizer``."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-tokenizer-") as name:
        folder = Path(name)
        shell = _split(read(), folder)  # the JSON is freed before the model is built
        files = str(folder / _VOCAB), str(folder / _MERGES)
        return _load_in_parts(shell, lambda options: BPE.from_file(*files, **options))


def _load_from_lists(read: Callable[[], TokenizerDocument]) -> Tokenizer:
    """A BPE. Raises ``_UnsupportedTokenizer``."""
    document = read()
    _require_bpe(document)
    ids: dict[str, int] = {}
    for part in document.vocabulary():
        ids.update(part)
    merges = [pair for pairs in document.merges() for pair in pairs]
    shell = _without_vocabulary(document)
    del document
    return _load_in_parts(shell, lambda options: BPE(ids, merges, **options))


def _load_decoding(read: Callable[[], TokenizerDocument]) -> TokenDecoder:
    document = read()
    ids, repeated = vocabulary_ids(document)
    document = replace(document, model={})  # the JSON is freed before the decoder is built
    added = added_ids(document, ids, len(ids) + len(repeated))
    changed, decoder = _normalized(document)
    # Several may have one id, by their text or by chance: the last is declared, the last that changes is spelt.
    declared = {added[token.content]: token.content for token in document.added_tokens if token.content}
    spelt = declared | {
        added[token.content]: changed[token.content]
        for token in document.added_tokens
        if token.is_normalized and token.content in changed
    }
    return TokenDecoder(
        chain(repeated, _emptied(ids), ((spelling, token_id) for token_id, spelling in spelt.items())),
        declared,
        {token.content for token in document.added_tokens if token.special},
        decoder,
    )


def _normalized(document: TokenizerDocument) -> tuple[dict[str, str], Decoder | None]:
    """Texts of added tokens that the normalizer changes, as it changes them; and the decoder."""
    changed: dict[str, str] = {}
    tokens = tuple({token.content: token for token in document.added_tokens if token.is_normalized}.values())
    # The library holds the interpreter while it adds tokens: in slices, so that other threads run meanwhile.
    for begin in range(0, max(1, len(tokens)), ADDED_TOKENS_PER_SLICE):
        part = tokens[begin : begin + ADDED_TOKENS_PER_SLICE]
        model = _model_of({token.content: i for i, token in enumerate(part)})
        stand_in = _tokenizer(model, replace(document, added_tokens=part), decodes_only=True)
        for i, token in enumerate(part):
            spelling = stand_in.id_to_token(i)
            if spelling is not None and spelling != token.content:
                changed[token.content] = spelling
    return changed, stand_in.decoder


def _emptied(ids: dict[str, int]) -> Iterator[tuple[str, int]]:
    """The entries, each freed as it is used."""
    while ids:
        yield ids.popitem()


def _load_whole(document: TokenizerDocument) -> Tokenizer:
    model: dict[str, Any] = dict(document.model)
    if document.model_type == "BPE":
        model |= {"type": "BPE", "dropout": None}
    tokenizer = _tokenizer(model, document, decodes_only=False)
    if isinstance(tokenizer.model, BPE):
        tokenizer.model._resize_cache(BPE_CACHE_WORDS)
    return tokenizer


def _tokenizer(model: dict[str, Any], document: TokenizerDocument, *, decodes_only: bool) -> Tokenizer:
    """The document's, with this model."""
    try:
        with _panics_as_errors():
            return Tokenizer.from_str(document.encode(model, decodes_only=decodes_only))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerRefused("", f"it cannot be read: {error}") from error


def _load_in_parts(document: TokenizerDocument, load: Callable[[dict[str, Any]], Model]) -> Tokenizer:
    """The tokenizer with the model that ``load`` makes with its options. Raises ``_UnsupportedTokenizer``."""
    options = {name: decode_json(document.model[name], Any, name) for name in _OPTIONS if name in document.model}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        with _panics_as_errors():
            model = load({**given, "cache_capacity": BPE_CACHE_WORDS})
            _check_ids(document, model)
            # The library adds tokens one by one in quadratic time unless it reads them from JSON, and their ids depend
            # on the model's vocabulary. Hence a model of just these tokens, replaced once they are added.
            added = {token.content: token.id for token in document.added_tokens}
            tokenizer = _tokenizer(_model_of(added), document, decodes_only=False)
            tokenizer.model = model
            return tokenizer
    except Exception as error:  # the library raises nothing narrower; loading the whole explains it
        raise _UnsupportedTokenizer from error


def _model_of(tokens: Mapping[str, int]) -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": tokens, "unk_token": ""}


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
    _require_bpe(document)
    (folder / _VOCAB).write_bytes(document.model["vocab"])
    with (folder / _MERGES).open("wb") as file:
        file.writelines(_lines(pairs) for pairs in document.merges())
    return _without_vocabulary(document)


def _require_bpe(document: TokenizerDocument) -> None:
    if document.model_type != "BPE" or "merges" not in document.model:
        raise _UnsupportedTokenizer


def _without_vocabulary(document: TokenizerDocument) -> TokenizerDocument:
    return replace(document, model={name: raw.copy() for name, raw in document.model.items() if name in _OPTIONS})


def _lines(pairs: list[tuple[str, str]]) -> bytes:
    """The lines of a merges file. Raises ``_UnsupportedTokenizer`` if it cannot hold these merges."""
    text = "".join([f"{left} {right}\n" for left, right in pairs])
    if text.count("\n") != len(pairs) or text.count(" ") != len(pairs) or "\r" in text or "#version" in text:
        raise _UnsupportedTokenizer
    return text.encode()
