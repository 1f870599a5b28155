"""The decoders of the token path: whatever 8 MiB have as their shape, decoding takes little time and memory."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any, Final

import msgspec
import pytest

from tests.support.cpu_steps import short_step
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.dialects.anthropic import requests as messages
from torchrelay.gateway.dialects.embeddings import requests as embeddings
from torchrelay.gateway.dialects.openai import requests as openai
from torchrelay.gateway.dialects.responses import requests as responses

NUM_BYTES: Final = 8 << 20
MOST_OF_BODY: Final = 4
Decode = Callable[[bytes], Any]
DECODERS: dict[str, tuple[Decode, tuple[str, ...]]] = {
    "chat": (
        lambda body: openai.params_of_chat(openai.decode_chat(body)),
        ("messages", "tools", "stop", "logit_bias", "chat_template_kwargs", "unknown"),
    ),
    "completions": (
        lambda body: [openai.params_of_completion(e) for e in openai.one_per_prompt(openai.decode_completion(body))],
        ("prompt", "logit_bias", "guided_json"),
    ),
    "embeddings": (
        lambda body: embeddings.params_of(embeddings.decode_embeddings(body)),
        ("input", "messages", "truncate"),
    ),
    "messages": (
        lambda body: messages.params_of(messages.decode_body(body)),
        ("messages", "tools", "system", "metadata"),
    ),
    "responses": (
        lambda body: responses.params_of(responses.decode_body(body)),
        ("input", "tools", "include", "metadata", "text"),
    ),
}
LISTED: dict[str, bytes] = {
    "texts": b'"",',
    "escapes": rb'"\\",',
    "numbers": b"1,",
    "fractions": b"1.5,",
    "objects": b"{},",
    "lists": b"[],",
    "pairs": b'{"a":1},',
}
NEEDED: dict[str, str] = {
    "messages": '[{"role":"user","content":"a"}]',
    "prompt": '"a"',
    "input": '"a"',
    "model": '"m"',
    "max_tokens": "1",
}


def body_of(field: str, shape: str) -> bytes:
    head = ",".join(f'"{name}":{value}' for name, value in NEEDED.items() if name != field)
    begin = f'{{{head},"{field}":'.encode()
    if shape == "names":
        return begin + b"{%s}}" % b",".join(b'"%07d":1' % number for number in range(NUM_BYTES // 12))
    if shape == "text of JSON":
        return begin + b'"%s"}' % (rb"{\"a\": [1]}," * (NUM_BYTES // 14))
    part = LISTED[shape]
    return begin + b"[%s]}" % (part * (NUM_BYTES // len(part)))[:-1]


@pytest.mark.parametrize("decoder", DECODERS)
def test_decoding_takes_little_time_and_memory(decoder: str, subtests: pytest.Subtests) -> None:
    decode, fields = DECODERS[decoder]
    for field, shape in product(fields, [*LISTED, "names", "text of JSON"]):
        with subtests.test(f"{field}: {shape}"):
            body = body_of(field, shape)
            with short_step(), suppress(InvalidRequest):
                decode(body)
            tracemalloc.start()
            try:
                with suppress(InvalidRequest):
                    decode(body)
                assert tracemalloc.get_traced_memory()[1] < MOST_OF_BODY * len(body)
            finally:
                tracemalloc.stop()


def test_numbers_are_bounded_outside_of_texts() -> None:
    with pytest.raises(InvalidRequest, match="more than 3,500,000 values"):
        openai.decode_completion(body_of("prompt", "numbers"))
    ids = [[1] * 1_700_000] * 2
    assert openai.decode_completion(msgspec.json.encode({"model": "m", "prompt": ids})).prompt == ids
    text = "," * 4_000_000
    assert openai.decode_completion(msgspec.json.encode({"model": "m", "prompt": text})).prompt == text


def test_prompt_may_be_any_text_of_json() -> None:
    text = '{"a": [{"b": "c\\\\"}]}, ' * 100_000
    body = openai.decode_completion(msgspec.json.encode({"model": "m", "prompt": text}))
    assert body.prompt == text


@pytest.mark.parametrize("decoder", DECODERS)
def test_body_that_is_cut_off_is_no_valid_json(decoder: str) -> None:
    """A field with a wrong type before the cut was the only error that was named."""
    with pytest.raises(InvalidRequest, match="the body is not valid JSON"):
        DECODERS[decoder][0](b'{"model": 1, "input": "cut')


@pytest.mark.parametrize(
    ("fields", "field", "hint"),
    [
        ({"grammer": "root ::= x"}, "grammer", "did you mean grammar, which is not supported yet?"),
        ({"bad_word": ["x"]}, "bad_word", "did you mean bad_words, which is not supported yet?"),
        ({"grammar": "root ::= x"}, "grammar", "is not supported yet: use structured_outputs.grammar"),
        ({"documents": [{"text": "x" * 100}]}, "documents", "is not supported yet"),
        ({"typical_p": 0.5}, "typical_p", "is not supported yet"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_and_so_are_their_typos(
    fields: dict[str, Any], field: str, hint: str
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(InvalidRequest, match=re.escape(hint)) as refused:
        openai.decode_chat(msgspec.json.encode(body))
    assert refused.value.field == field


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_values_that_ask_for_nothing_are_accepted(value: Any) -> None:
    responses.decode_body(msgspec.json.encode({"model": "m", "input": "a", "conversation": value}))
    harmless = {"typical_p": 1.0, "logits_processors": [], "modalities": ["text"], "grammar": None}
    openai.decode_chat(msgspec.json.encode({"model": "m", "messages": [], **harmless}))
