"""A tokenizer.json, read as untrusted input before the tokenizers library sees any of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from torchrelay.common.tokens import tokenizer_limits as limits
from torchrelay.common.tokens.tokenizer_limits import TokenizerRefused

_NULL = msgspec.Raw(b"null")
_MAX_COMPONENT_BYTES: Final = 4 << 20  # of one component's JSON
_MAX_OPTION_BYTES: Final = 8 * limits.MAX_TOKEN_CHARS  # of a member of the model, without vocabulary and merges

# Slices of vocabularies and merges in all their forms. Possessive quantifiers: linear time on any upload.
_STRING = rb'"(?:[^"\\]|\\.)*+"'
_NUMBER = rb"[-+.0-9eE]++"
_PAIRS = re.compile(rb"(?:\s*+\[\s*+" + _STRING + rb"\s*+,\s*+" + _STRING + rb"\s*+\]\s*+,?+){1,1024}+")
_LINES = re.compile(rb"(?:\s*+" + _STRING + rb"\s*+,?+){1,1024}+")
_IDS = re.compile(rb"(?:\s*+" + _STRING + rb"\s*+:\s*+" + _NUMBER + rb"\s*+,?+){1,1024}+")
_SCORES = re.compile(rb"(?:\s*+\[\s*+" + _STRING + rb"\s*+,\s*+" + _NUMBER + rb"\s*+\]\s*+,?+){1,1024}+")


class AddedTokenEntry(msgspec.Struct, frozen=True):
    """A token that is found in the text before the model sees it."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    @property
    def is_normalized(self) -> bool:
        """Whether the normalizer changes its text too."""
        return not self.special if self.normalized is None else self.normalized

    def fields(self) -> dict[str, Any]:
        """All fields, as the library requires."""
        return {**msgspec.structs.asdict(self), "normalized": self.is_normalized}


class _Fields(msgspec.Struct):
    model: dict[str, msgspec.Raw]
    added_tokens: list[AddedTokenEntry] | None = None
    normalizer: msgspec.Raw = _NULL
    pre_tokenizer: msgspec.Raw = _NULL
    post_processor: msgspec.Raw = _NULL
    decoder: msgspec.Raw = _NULL


@dataclass(frozen=True, slots=True)
class TokenizerDocument:
    """The parts of a tokenizer.json that are used, within their limits.

    The library gets a document made of them, never the original, whose keys may come twice. ``model`` holds its members
    unparsed: vocabulary and merges are nearly all of the file.
    """

    model_type: str
    model: dict[str, msgspec.Raw]
    added_tokens: tuple[AddedTokenEntry, ...]
    normalizer: Any
    pre_tokenizer: Any
    post_processor: Any
    decoder: Any

    @property
    def has_scores(self) -> bool:
        """Whether the vocabulary is a Unigram's list, whose ids are its places."""
        return bytes(memoryview(self.model["vocab"])[:1]) != b"{"

    def vocabulary(self) -> Iterator[list[tuple[str, int]]]:
        """Tokens and their ids, a thousand at a time. Raises ``TokenizerRefused``."""
        vocab = self.model["vocab"]
        if not self.has_scores:
            for part in _slices(vocab, _IDS, "model.vocab"):
                yield list(decode_json(b"{" + part + b"}", dict[str, int], "model.vocab").items())
            return
        first_id = 0
        for part in _slices(vocab, _SCORES, "model.vocab"):
            scored = decode_json(b"[" + part + b"]", list[tuple[str, float]], "model.vocab")
            yield [(token, first_id + index) for index, (token, _) in enumerate(scored)]
            first_id += len(scored)

    def merges(self) -> Iterator[list[tuple[str, str]]]:
        """The merges of a BPE, a thousand at a time. Raises ``TokenizerRefused``."""
        merges = self.model["merges"]
        are_pairs = _PAIRS.match(memoryview(merges), 1) is not None
        for part in _slices(merges, _PAIRS if are_pairs else _LINES, "model.merges"):
            if are_pairs:
                yield decode_json(b"[" + part + b"]", list[tuple[str, str]], "model.merges")
                continue
            lines = decode_json(b"[" + part + b"]", list[str], "model.merges")
            pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
            if any(not right or " " in right for _, right in pairs):
                raise TokenizerRefused("model.merges", "a merge is not two tokens with a space between them")
            yield pairs

    def encode(self, model: dict[str, Any], *, decodes_only: bool) -> str:
        """The JSON of a tokenizer with another ``model``, and without the parts that encode if it ``decodes_only``."""
        # The library spells added tokens as their normalizer does. Where that could be slow they keep their own
        # spelling; the normalizer is then run on no text.
        has_normalizer = not decodes_only or limits.is_linear(self.normalizer)
        fields = {
            "version": "1.0",
            "added_tokens": [token.fields() for token in self.added_tokens],
            "normalizer": self.normalizer if has_normalizer else None,
            "pre_tokenizer": None if decodes_only else self.pre_tokenizer,
            "post_processor": None if decodes_only else self.post_processor,
            "decoder": self.decoder,
            "model": model,
        }
        return msgspec.json.encode(fields).decode()


def read_tokenizer(encoded: bytes) -> TokenizerDocument:
    """Parses and checks a tokenizer.json. Raises ``TokenizerRefused``."""
    fields: _Fields = decode_json(encoded, _Fields, "")
    if "vocab" not in fields.model:
        raise TokenizerRefused("model.vocab", "it is missing")
    for name, raw in fields.model.items():
        if name not in ("vocab", "merges"):
            limits.require_at_most(_MAX_OPTION_BYTES, len(memoryview(raw)), f"model.{name[:40]}", "bytes")
    named = decode_json(fields.model.get("type", _NULL), str | None, "model.type")
    added_tokens = sorted(fields.added_tokens or (), key=lambda token: token.id)
    limits.check_added_tokens(token.content for token in added_tokens)
    document = TokenizerDocument(
        model_type=named or ("BPE" if "merges" in fields.model else ""),  # older files do not name the type
        model=fields.model,
        added_tokens=tuple(added_tokens),
        normalizer=_component(fields.normalizer, "normalizer"),
        pre_tokenizer=_component(fields.pre_tokenizer, "pre_tokenizer"),
        post_processor=_component(fields.post_processor, "post_processor"),
        decoder=_component(fields.decoder, "decoder"),
    )
    _check_merged_prefix(document)
    size = limits.VocabularySize()
    for part in document.vocabulary():
        size.add(token for token, _ in part)
    longest_added = max((len(token.content) for token in added_tokens), default=0)
    limits.check_decode_cost(document.decoder, max(size.longest_chars, longest_added))
    return document


def decode_json(encoded: bytes | msgspec.Raw, form: Any, field: str) -> Any:
    """``encoded`` as ``form``. Raises ``TokenizerRefused``."""
    try:
        return msgspec.json.decode(encoded, type=form)
    except RecursionError:
        raise TokenizerRefused(field, "its JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerRefused(field, f"it is not a tokenizer of the tokenizers library: {error}") from None


def _check_merged_prefix(document: TokenizerDocument) -> None:
    # The library cuts this prefix off the second token of each merge unseen. Cut inside a character, it aborts the
    # process.
    prefix = decode_json(document.model.get("continuing_subword_prefix", _NULL), str | None, "model")
    if prefix and "merges" in document.model:
        for pairs in document.merges():
            for _, right in pairs:
                if not right.startswith(prefix):
                    raise TokenizerRefused("model.merges", f"{right[:40]!r} lacks the continuing_subword_prefix")


def _component(raw: msgspec.Raw, name: str) -> Any:
    limits.require_at_most(_MAX_COMPONENT_BYTES, len(memoryview(raw)), name, "bytes")
    component = decode_json(raw, Any, name)
    limits.check_component(component, name)
    return component


def _slices(raw: msgspec.Raw, pattern: re.Pattern[bytes], field: str) -> Iterator[bytes]:
    """The members of a JSON object or list, a thousand at a time, so that other threads run meanwhile."""
    data, begin = memoryview(raw), 1
    while (match := pattern.match(data, begin)) is not None:
        yield match[0].rstrip().rstrip(b",")
        begin = match.end()
    if bytes(data[begin:]).strip() not in (b"]", b"}"):
        raise TokenizerRefused(field, "it is not a tokenizer of the tokenizers library: an entry has a wrong form")
