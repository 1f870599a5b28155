"""Lone surrogates and NUL characters are refused by the field that has them; clients' line ends are escaped."""

from __future__ import annotations

import json

import pytest

from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.openai.replies import error_event
from torchrelay.gateway.openai.unusable_text import check_text

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (r'{"name": "a\ud800"}', "name"),
        (r'{"files": [{"path": "b"}, {"path": "c\uDFFF"}]}', "files.1.path"),
        (r'{"nested": {"deep": "\u0000"}}', "nested.deep"),
        (r'{"k\u0000": 1}', None),
        (r'["\ud83d"]', "0"),
    ],
)
def test_field_with_unusable_text_is_named(body: str, field: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_text(body.encode())
    assert refused.value.field == field


@pytest.mark.parametrize("body", [r'{"a": "😀 \ud83d\ude00 \\u0000"}', '{"a": "é"}', r'{"a": "\u0000', "[]"])
def test_other_bodies_pass(body: str) -> None:
    check_text(body.encode())


@pytest.mark.parametrize("field", ["model", "prompt", "stop", "user"])
async def test_token_path_names_field_with_surrogate(rig: TokenPathRig, field: str) -> None:
    body = {"model": "echo", "prompt": "a", "max_tokens": 1, field: "@"}
    content = json.dumps(body).replace("@", r"\ud800")
    answer = await rig.http.post("/v1/completions", content=content, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field) and "lone surrogate" in error["message"]


def test_line_ends_of_unicode_are_escaped() -> None:
    text = "a\u2028b\u2029c\u0085d é ☃ \u2027"
    event = error_event({"text": text})
    assert event.decode().splitlines() == [event.decode().strip(), ""]
    assert json.loads(event.removeprefix(b"data: "))["text"] == text
    assert "é ☃" in event.decode()
