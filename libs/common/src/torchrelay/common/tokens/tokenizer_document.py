"""A tokenizer.json, read as a stranger's input before the tokenizers library sees any of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_NULL = msgspec.Raw(b"null")
# Normalizers that take linear time on any text: no patterns, and no tables of the tenant's.
_LINEAR_NORMALIZERS = frozenset(
    (
        "BertNormalizer",
        "ByteLevel",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Prepend",
        "Strip",
        "StripAccents",
    )
)


class TokenizerRefused(ValueError):
    """A tokenizer.json that is malformed or beyond a limit; ``field`` is where in it, empty for the whole."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}" if field else detail)
        self.field = field


class AddedTokenEntry(msgspec.Struct, frozen=True):
    """A token that is found in the text before the model sees it."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    def fields(self) -> dict[str, Any]:
        """All fields, as the library requires."""
        normalized = not self.special if self.normalized is None else self.normalized
        return {**msgspec.structs.asdict(self), "normalized": normalized}


class _Fields(msgspec.Struct):
    model: dict[str, msgspec.Raw]
    added_tokens: list[AddedTokenEntry] | None = None
    normalizer: msgspec.Raw = _NULL
    pre_tokenizer: msgspec.Raw = _NULL
    post_processor: msgspec.Raw = _NULL
    decoder: msgspec.Raw = _NULL


@dataclass(frozen=True, slots=True)
class TokenizerDocument:
    """The parts of a tokenizer.json that are used; the library never gets the original, whose keys may come twice.

    ``model`` holds its members unparsed: vocabulary and merges are nearly all of the file.
    """

    model_type: str
    model: dict[str, msgspec.Raw]
    added_tokens: tuple[AddedTokenEntry, ...]
    normalizer: Any
    pre_tokenizer: Any
    post_processor: Any
    decoder: Any

    def vocabulary(self) -> dict[str, int] | list[tuple[str, float]]:
        """Token to id, or for a Unigram (token, score) in the order of ids. Raises ``TokenizerRefused``."""
        vocab: dict[str, int] | list[tuple[str, float]] = decode_json(
            self.model["vocab"], dict[str, int] | list[tuple[str, float]], "model.vocab"
        )
        return vocab

    def encode(self, model: dict[str, Any], *, decodes_only: bool) -> str:
        """The JSON of a tokenizer with another ``model``, and without the parts that encode if it ``decodes_only``."""
        # The library spells added tokens as their normalizer does. Where that could be slow they keep their own
        # spelling; the normalizer is then run on no text.
        has_normalizer = not decodes_only or _is_linear(self.normalizer)
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


def _is_linear(normalizer: Any) -> bool:
    match normalizer:
        case {"type": "Sequence", "normalizers": list(steps)}:
            return all(map(_is_linear, steps))
        case {"type": "Replace", "pattern": {"String": str()}}:
            return True
        case {"type": str(kind)}:
            return kind in _LINEAR_NORMALIZERS
    return False


def read_tokenizer(encoded: bytes) -> TokenizerDocument:
    """Parses a tokenizer.json. Raises ``TokenizerRefused``."""
    fields = decode_json(encoded, _Fields, "")
    if "vocab" not in fields.model:
        raise TokenizerRefused("model.vocab", "it is missing")
    named = decode_json(fields.model.get("type", _NULL), str | None, "model.type")
    return TokenizerDocument(
        model_type=named or ("BPE" if "merges" in fields.model else ""),  # older files do not name the type
        model=fields.model,
        added_tokens=tuple(sorted(fields.added_tokens or (), key=lambda token: token.id)),
        normalizer=decode_json(fields.normalizer, Any, "normalizer"),
        pre_tokenizer=decode_json(fields.pre_tokenizer, Any, "pre_tokenizer"),
        post_processor=decode_json(fields.post_processor, Any, "post_processor"),
        decoder=decode_json(fields.decoder, Any, "decoder"),
    )


def decode_json(encoded: bytes | msgspec.Raw, form: Any, field: str) -> Any:
    """``encoded`` as ``form``. Raises ``TokenizerRefused``."""
    try:
        return msgspec.json.decode(encoded, type=form)
    except RecursionError:
        raise TokenizerRefused(field, "its JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerRefused(field, f"it is not what the tokenizers library reads: {error}") from None
