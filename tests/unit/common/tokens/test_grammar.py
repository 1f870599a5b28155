"""Random outputs that masks allow: those of JSON schemas validate, whatever the division into tokens."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.support.sample_tokenizers import tiny_tokenizer
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.tokens.grammar import Grammar, GrammarCompiler, grammar_error
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.common.tokens.tokenizer import load_decoder

NUM_SCHEMAS = 200
MAX_TOKENS = 400
_FORMATS = ("date", "uuid", "ipv4", "ipv6", "email", "hostname")
_STYLE = {"whitespace_pattern": r"[\x20\x0A]{1,2}"}


@cache
def decoder() -> TokenDecoder:
    return load_decoder(tiny_tokenizer())


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(decoder())


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "format", "pattern", "null"]
    if depth < 3:
        kinds += ["object", "array", "anyOf", "tree"] * 2
    match rng.choice(["object"] if not depth else kinds):
        case "object":
            names = rng.sample(["kind", "name", "größe", "a b", "x", "n_1"], rng.randint(0, 4))
            required = [name for name in names if rng.random() < 0.7]
            properties = {name: random_schema(rng, depth + 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            few = rng.randint(0, 2)
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": few, "maxItems": few + 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "tree":
            return {"$ref": "#/$defs/tree"}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "number":
            return {"type": "number", "minimum": -2.5, "exclusiveMaximum": rng.randint(3, 90)}
        case "boolean" | "null" as kind:
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample(["torch", "relay", 3, None, True, "🔥"], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["v1", 7, False])}
        case "format":
            return {"type": "string", "format": rng.choice(_FORMATS)}
        case _:
            return {"type": "string", "pattern": rng.choice(["^[a-z]{2,4}$", "^\\d{3}-[A-F]+$"]), "maxLength": 12}


TREE = {
    "type": "object",
    "properties": {"leaf": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["leaf", "next"],
    "additionalProperties": False,
}


def random_output(grammar: Grammar, rng: random.Random) -> list[int] | None:
    """Tokens drawn from the masks, the last of which ends the output; None if it does not end in time."""
    state, tokens = grammar.start(), list[int]()
    while len(tokens) < MAX_TOKENS:
        if state.is_complete:
            return tokens
        bits = np.unpackbits(np.frombuffer(state.allowed(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: grammar.end_id])
        if bits[grammar.end_id] and (not len(allowed) or rng.random() < 0.5):
            return tokens
        assert len(allowed), state.error
        token = int(rng.choice(allowed))
        tokens.append(token)
        state.advance(token)
        assert not state.error
    return None


def test_finished_outputs_of_random_schemas_validate() -> None:
    finished = refused = 0
    for number in range(NUM_SCHEMAS):
        rng = random.Random(number)
        schema = {**random_schema(rng), "$defs": {"tree": TREE}}
        source = f"start: %json {json.dumps({**schema, 'x-guidance': _STYLE})}"
        if grammar_error(source):
            refused += 1
            continue
        grammar = compiler().compile(source)
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for _ in range(3):
            tokens = random_output(grammar, rng)
            if tokens is not None:
                finished += 1
                validator.validate(json.loads(decoder().decode(tokens)))
    assert finished > 2 * NUM_SCHEMAS and refused < NUM_SCHEMAS // 10


def test_times_follow_the_syntax_of_rfc_3339() -> None:
    """By its ABNF, which allows a second 60 and a small "t"; validators of JSON schemas refuse these."""
    grammar = compiler().compile('start: %json {"type": "string", "format": "date-time"}')
    pattern = r'"\d{4}-\d\d-\d\d[tT]\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)"'
    outputs = [random_output(grammar, random.Random(number)) for number in range(20)]
    texts = [decoder().decode(tokens) for tokens in outputs if tokens is not None]
    assert len(texts) > 10 and all(re.fullmatch(pattern, text) for text in texts)


def test_state_after_output_is_that_of_its_tokens() -> None:
    grammar = compiler().compile('start: %json {"type": "array", "items": {"type": "integer"}}')
    tokens = random_output(grammar, random.Random(4))
    assert tokens is not None and len(tokens) > 3
    stepped = grammar.start()
    for place, token in enumerate(tokens):
        assert grammar.start(tokens[:place]).allowed() == stepped.allowed()
        stepped.advance(token)
    assert stepped.is_complete == grammar.start(tokens).is_complete
    strayed = grammar.start([*tokens[:1], *tokens[:1], *decoder_ids("x")])
    assert strayed.error and not strayed.is_complete


def decoder_ids(text: str) -> list[int]:
    return [next(i for i in range(decoder().num_ids) if decoder().decode([i]) == text)]


def test_special_token_is_allowed_where_it_is_named() -> None:
    [special] = [i for i in range(decoder().num_ids) if decoder().shown(i) is None]
    assert _allows(compiler().compile(f"start: <[{special}]>"), special)
    assert not _allows(compiler().compile("start: /(.|\\n)*/"), special)


def _allows(grammar: Grammar, token_id: int) -> bool:
    return bool(grammar.start().allowed()[token_id // 8] >> token_id % 8 & 1)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("start: missing", "missing"),
        ('start: %json {"type": "object", "dependentRequired": {}}', "dependentRequired"),
        ("start: /(/", ""),
    ],
)
def test_unusable_grammar_is_refused_with_a_reason(source: str, why: str) -> None:
    error = grammar_error(source)
    assert error and why in error and "\n" not in error
    with pytest.raises(InvalidRequest):
        compiler().compile(source)


@pytest.mark.parametrize(
    ("num_properties", "is_required", "error"),
    [(400, False, ""), (4000, True, ""), (3000, False, "too big"), (6000, True, "too big")],
)
def test_size_is_bounded(num_properties: int, is_required: bool, error: str) -> None:
    names = [f"key{number}" for number in range(num_properties)]
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    if is_required:
        schema["required"] = names
    found = grammar_error(f"start: %json {json.dumps({**schema, 'additionalProperties': False})}")
    assert error in found and bool(found) == bool(error)


def test_options_are_refused_only_where_they_are_declared() -> None:
    assert "%llguidance" in grammar_error('start: "a"\n  %llguidance {"no_forcing": false}')
    assert grammar_error('start: %json {"enum": ["%llguidance"]}') == ""
