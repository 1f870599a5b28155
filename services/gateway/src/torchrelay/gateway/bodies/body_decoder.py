"""Decodes JSON bodies into structs, with errors that name the faulty field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.validation import BOOLEAN, INTEGER, LIST, NUMBER, OBJECT, STRING, quote_value
from torchrelay.gateway.bodies.typo_hints import typo_hint
from torchrelay.gateway.bodies.unusable_text import check_text

B = TypeVar("B", bound=msgspec.Struct)
_NAMES: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]{0,30}")
_MAX_EXACT_FLOAT = 1 << 53
_FIELD = re.compile(r"required field `(\w+)`")
_EXPECTED = re.compile(r"Expected `([^`]+)`(?: ([<>]=?) (-?\d+))?")
_GOT = re.compile(r"got `(\w+)`")
_KINDS = {"int": INTEGER, "float": NUMBER, "str": STRING, "bool": BOOLEAN, "array": LIST, "object": OBJECT}
_BOUNDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
_PRIVATE_FIELDS = {"messages", "prompt", "input", "instructions"}  # never quoted in errors
_STRING = re.compile(rb'"[^"]*"')
_MAX_PARTS = 200_000  # objects, lists and fields of a body; of each, decoding makes some hundred bytes
_MAX_QUOTES = 4 * _MAX_PARTS  # of two texts for each of these
_MAX_COMMAS = 3_500_000  # a token id of one digit takes nine bytes of a list that grows, for two of the body
_MAX_INSPECTED_BYTES = 1 << 16  # parsing megabytes again to find a faulty value would take seconds
_MAX_FAULT_CHARS = 200  # of a message of msgspec, which may quote the name of a field
_MALFORMED = "JSON is malformed: "  # how messages of msgspec begin
_MAX_HARMLESS_BYTES = 32  # of a refused field's value that asks for nothing


@dataclass(frozen=True, slots=True)
class OtherFields:
    """Fields beside those of a struct.

    Fields of ``ignored`` change no answer. Fields of ``refused`` would, unless their value is null or the value here,
    any of several in a tuple; ``reasons`` has the messages of some of their errors.
    """

    ignored: Set[str]
    refused: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> Set[str]:
        return self.ignored | self.refused.keys()


def decode(decoder: msgspec.json.Decoder[B], encoded: bytes | bytearray, others: OtherFields) -> B:
    """Raises ``InvalidRequest``, also for a refused field and for an unknown name that looks like a typo."""
    if not encoded:
        raise InvalidRequest("the body is empty: send the request as JSON")
    _check_num_parts(encoded)
    try:
        body = decoder.decode(encoded)
        given = _NAMES.decode(encoded)
        for name in others.refused:
            if name in given and _has_effect(given[name], others.refused[name]):
                message = others.reasons.get(name, f"{name} is not supported yet")
                raise InvalidRequest(message, field=name)
        if typo := typo_hint(given.keys(), (*type(body).__struct_fields__, *others.refused), others.ignored):
            known = f"{typo[1]}, which is not supported yet" if typo[1] in others.refused else typo[1]
            raise InvalidRequest(f"unknown field {typo[0]}; did you mean {known}?", field=typo[0])
        return body
    except msgspec.ValidationError as error:
        if "got `float`" in str(error) and (rewritten := _with_whole_numbers(encoded)) is not None:
            return decode(decoder, rewritten, others)
        _check_is_whole(encoded)  # before the end of a body that is cut off, a field may seem to have another type
        message, faulty = _explain(str(error), encoded)
        raise InvalidRequest(message, field=faulty) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if faulty := _not_a_number(encoded):
            message = f"{faulty} must be a finite number: JSON has no NaN or Infinity"
            raise InvalidRequest(message, field=faulty) from error
        if len(encoded) <= _MAX_INSPECTED_BYTES:
            check_text(encoded, allows_nul=True)
        raise InvalidRequest(f"the body is not valid JSON: {str(error).removeprefix(_MALFORMED)}") from error


def _has_effect(given: msgspec.Raw, harmless: Any) -> bool:
    if len(memoryview(given)) > _MAX_HARMLESS_BYTES:
        return True
    return msgspec.json.decode(given) not in (None, *(harmless if isinstance(harmless, tuple) else (harmless,)))


def _check_is_whole(encoded: bytes | bytearray) -> None:
    try:
        _NAMES.decode(encoded)
    except msgspec.ValidationError:
        return  # JSON, but no object
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _check_num_parts(encoded: bytes | bytearray) -> None:
    """Refuses a body that would take many times its size in memory. Texts may have any number of brackets."""
    num_commas = encoded.count(b",")
    if _num_parts(encoded) <= _MAX_PARTS and encoded.count(b'"') <= _MAX_QUOTES and num_commas <= _MAX_COMMAS:
        return
    bare = encoded.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > _MAX_QUOTES or _num_parts(bare := _STRING.sub(b"", bare)) > _MAX_PARTS:
        raise InvalidRequest(f"the body has more than {_MAX_PARTS:,} objects, lists and fields, or twice as many texts")
    if bare.count(b",") > _MAX_COMMAS:
        raise InvalidRequest(f"the body has more than {_MAX_COMMAS:,} values; send fewer token ids at once")


def _num_parts(encoded: bytes | bytearray) -> int:
    return sum(map(encoded.count, (b"{", b"[", b":")))


def _with_whole_numbers(encoded: bytes | bytearray) -> bytes | None:
    """The body with fields such as ``4.0`` or ``[4.0, 5.0]`` written as integers; None if it has none.

    Some clients have no integers. It works on the encoded fields, since a prompt may have a million numbers.
    """
    try:
        fields = {name: bytes(raw) for name, raw in _NAMES.decode(encoded).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    whole = {name: _whole(raw) for name, raw in fields.items()}
    if whole == fields:
        return None
    return msgspec.json.encode({name: msgspec.Raw(raw) for name, raw in whole.items()})


def _whole(raw: bytes) -> bytes:
    if raw.startswith(b"["):
        return raw if b'"' in raw else raw.replace(b".0,", b",").replace(b".0]", b"]")
    if _NUMBER.fullmatch(raw) and abs(number := float(raw)) <= _MAX_EXACT_FLOAT and number.is_integer():
        return b"%d" % number
    return raw


def _explain(fault: str, encoded: bytes | bytearray) -> tuple[str, str | None]:
    """msgspec's message as a sentence, and the field of the body it is about."""
    path, missing, expected = _PATH.search(fault), _FIELD.search(fault), _EXPECTED.match(fault)
    where = path[1] if path else ""
    if missing:
        where = f"{where}.{missing[1]}".lstrip(".")
    name = re.split(r"[.\[]", where)[0] or None
    if missing:
        return f"{where} is missing", name
    if expected is None:
        return f"{where}: {_PATH.sub('', fault)[:_MAX_FAULT_CHARS]}".removeprefix(": "), name
    kinds = [_KINDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
    wanted = f"{_BOUNDS[expected[2]]} {expected[3]}" if expected[2] else " or ".join(kinds)
    got = _GOT.search(fault)
    given = _given(where, encoded) or (_KINDS.get(got[1], got[1]) if got else "")
    return f"{where or 'the body'} must be {wanted}{f', not {given}' if given else ''}", name


def _given(field: str, encoded: bytes | bytearray) -> str:
    """The field's value, abbreviated; empty for nested and private fields."""
    if len(encoded) > _MAX_INSPECTED_BYTES or field in _PRIVATE_FIELDS:
        return ""
    try:
        return quote_value(json.loads(encoded)[field])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _not_a_number(encoded: bytes | bytearray) -> str | None:
    """The field with a NaN or Infinity, as Python's encoder writes them, in otherwise valid JSON."""
    if len(encoded) > _MAX_INSPECTED_BYTES or (b"NaN" not in encoded and b"Infinity" not in encoded):
        return None
    try:
        body = json.loads(encoded)
        fields = body.items() if isinstance(body, dict) else ()
        return next((name for name, value in fields if not _is_finite(value)), None)
    except (ValueError, RecursionError):
        return None


def _is_finite(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, inner)) and (not isinstance(value, float) or math.isfinite(value))
