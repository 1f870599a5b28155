"""Adds the tokens to tokenizer.json that other files of the upload declare, as transformers does when it loads them.

transformers 5 adds the tokens of ``added_tokens_decoder`` by id, then the named special tokens (``eos_token`` and
others that end in ``_token``), then ``extra_special_tokens``. Only without an ``added_tokens_decoder`` does it also
read special_tokens_map.json and added_tokens.json. A token of the vocabulary keeps its id there; the others continue
the vocabulary, whatever id is declared. An upload that declares another id is refused: the model has learned the
token's embedding at that id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from torchrelay.common.tokens.tokenizer_document import AddedTokenEntry, TokenizerDocument
from torchrelay.common.tokens.vocabulary import added_token_ids
from torchrelay.param_store.model_files import ADDED_TOKENS, SPECIAL_TOKENS, TOKENIZER_CONFIG
from torchrelay.param_store.packer.core import PackRefused, quoted

_DECODER, _EXTRA, _ADDITIONAL = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NO_ID = -1


@dataclass(frozen=True, slots=True)
class _Declared:
    """A token, the file that declares it, and its field there. The token's id is ``_NO_ID`` if the file names none."""

    file: str
    field: str
    token: AddedTokenEntry

    @property
    def content(self) -> str:
        return self.token.content

    def refused(self, fault: str) -> PackRefused:
        return PackRefused(self.file, f"{self.field}: {fault}")


class TokenDeclarations:
    """Tokens that files beside tokenizer.json declare. A document is empty if the upload lacks the file.

    Raises ``PackRefused`` for a value that declares no token.
    """

    def __init__(self, config: dict[str, Any], special_tokens: dict[str, Any], added_tokens: dict[str, Any]) -> None:
        self._has_decoder = _DECODER in config
        self._config = config
        self._special_tokens = {} if self._has_decoder else special_tokens
        self._named: dict[str, _Declared] = {}
        self._extra: list[_Declared] = []
        self._read_named(TOKENIZER_CONFIG, config)
        self._read_named(SPECIAL_TOKENS, self._special_tokens)
        self._named = {name: self._named[name] for name in (*_NAMES, *self._named) if name in self._named}
        self._read_extra(TOKENIZER_CONFIG, _EXTRA if config.get(_EXTRA) else _ADDITIONAL, config)
        self._read_extra(SPECIAL_TOKENS, _EXTRA, self._special_tokens)
        if self._has_decoder:
            self._numbered = list(_of_decoder(config[_DECODER]))
        else:
            special = {self._named[name].content for name in _NAMES if name in self._named}
            self._numbered = list(_of_file(added_tokens, special | {each.content for each in self._extra}))
        if _EXTRA not in config and _ADDITIONAL not in config and _EXTRA not in self._special_tokens:
            self._read_extra(SPECIAL_TOKENS, _ADDITIONAL, self._special_tokens)

    def _read_named(self, file: str, document: dict[str, Any]) -> None:
        for name, value in document.items():
            is_token = isinstance(value, str) or (isinstance(value, dict) and "content" in value)
            if value is not None and (name in _NAMES or (name.endswith("_token") and is_token)):
                self._named[name] = _declared(file, name, value)

    def _read_extra(self, file: str, key: str, document: dict[str, Any]) -> None:
        match document.get(key):
            case None:
                pass
            case list(tokens):
                self._extra += [_declared(file, f"{key}[{index}]", token) for index, token in enumerate(tokens)]
            case dict(tokens):
                self._named |= {name: _declared(file, f"{key}.{name}", token) for name, token in tokens.items()}
            case other:
                raise PackRefused(file, f"{key}: {quoted(other)} is not a list of tokens or an object of named tokens")

    def completed(self, document: TokenizerDocument, vocab_size: int) -> tuple[AddedTokenEntry, ...]:
        """The added tokens that transformers has with this tokenizer.json.

        Raises ``PackRefused`` if ids contradict, or exceed ``vocab_size`` though the token is not special.
        """
        present = {token.content: token for token in document.added_tokens if token.content}
        special = {each.content for each in self._named.values()}
        known = {*present, *(each.content for each in self._numbered)}
        others = [each for each in (*self._named.values(), *self._extra) if each.content not in known]
        added = {
            content: _as_special(token, not self._has_decoder and content in special)
            for content, token in present.items()
        }
        declared = [each for each in (*self._numbered, *others) if each.content]  # the library adds no empty token
        for each in declared:
            before = added.get(each.content)
            if self._has_decoder or each.content not in present:
                token = _as_special(each.token, each.content in special)
                if before is not None and before.special:  # the library never forgets that
                    token = msgspec.structs.replace(token, special=True, normalized=token.is_normalized)
                added[each.content] = token
        ids = added_token_ids(replace(document, added_tokens=tuple(added.values())))
        for each in declared:
            token_id = ids[each.content]
            if token_id >= vocab_size and not added[each.content].special:
                raise each.refused(
                    f"{quoted(each.content)} has the id {token_id}, which is outside the vocab_size {vocab_size} of"
                    " config.json: the model has no embedding for it"
                )
            if each.token.id not in (token_id, _NO_ID):
                raise each.refused(
                    f"{quoted(each.content)} has the id {each.token.id} here, and {token_id} by the vocabulary of"
                    " tokenizer.json; correct the id, or name the token in added_tokens of tokenizer.json"
                )
        placed = (msgspec.structs.replace(token, id=ids[content]) for content, token in added.items())
        return tuple(sorted(placed, key=lambda token: token.id))

    def completed_config(self) -> dict[str, Any]:
        """tokenizer_config.json with the named tokens of special_tokens_map.json, whose values count first."""
        return self._config | {
            name: each.content for name, each in self._named.items() if each.file == SPECIAL_TOKENS and name in _NAMES
        }


def _declared(file: str, field: str, value: Any, token_id: int = _NO_ID, special: bool = True) -> _Declared:
    """A token as text, or as an object with its flags."""
    fields = {"content": value, "special": special} if isinstance(value, str) else value
    if not isinstance(fields, dict):
        raise PackRefused(file, f"{field}: {quoted(value)} is neither a token's text nor an object with its content")
    is_special = special and "__type" not in fields  # transformers wrote such an object with all flags that differ
    try:
        token = msgspec.convert({"special": is_special, **fields, "id": token_id}, AddedTokenEntry)
    except msgspec.ValidationError as error:
        raise PackRefused(file, f"{field}: it is not a token: {error}") from None
    return _Declared(file, field, token)


def _of_decoder(decoder: Any) -> Iterator[_Declared]:
    if not isinstance(decoder, dict):
        raise PackRefused(TOKENIZER_CONFIG, f"{_DECODER}: it must be an object of tokens by id")
    for key in decoder:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise PackRefused(TOKENIZER_CONFIG, f"{_DECODER}: {quoted(key)} is not the id of a token")
    for key in sorted(decoder, key=int):
        yield _declared(TOKENIZER_CONFIG, f"{_DECODER}.{key}", decoder[key], int(key), special=False)


def _of_file(added_tokens: dict[str, Any], special: set[str]) -> Iterator[_Declared]:
    for content, token_id in added_tokens.items():
        if type(token_id) is not int or token_id < 0:
            raise PackRefused(ADDED_TOKENS, f"{quoted(content)}: {quoted(token_id)} is not the id of a token")
    for content, token_id in sorted(added_tokens.items(), key=lambda item: item[1]):
        flags = {"content": content, "normalized": content not in special, "special": content in special}
        yield _declared(ADDED_TOKENS, quoted(content), flags, token_id)


def _as_special(token: AddedTokenEntry, is_special: bool) -> AddedTokenEntry:
    return msgspec.structs.replace(token, special=True) if is_special else token
