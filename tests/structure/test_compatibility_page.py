"""docs/compatibility.md names every field that we or the official clients know, with its state in the code."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.dialects.anthropic import requests as anthropic_requests
from torchrelay.gateway.dialects.openai import requests

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\S[^|]*) \|", re.MULTILINE)
CHAT = set(requests.ChatBody.__struct_fields__) | requests.CHAT_FIELDS.names
COMPLETION = set(requests.CompletionBody.__struct_fields__) | requests.COMPLETION_FIELDS.names
MESSAGES = set(anthropic_requests.Body.__struct_fields__) | anthropic_requests.FIELDS.names
CHAT_CLIENT = set(typing.get_type_hints(chat_create_params.CompletionCreateParamsStreaming))
COMPLETION_CLIENT = set(typing.get_type_hints(completion_create_params.CompletionCreateParamsStreaming))
MESSAGES_CLIENT = set(typing.get_type_hints(message_create_params.MessageCreateParamsStreaming)) | set(
    typing.get_type_hints(message_count_tokens_params.MessageCountTokensParams)
)
FIELDS = {
    "Chat: OpenAI's fields": CHAT_CLIENT,
    "Completions: OpenAI's fields": COMPLETION_CLIENT,
    "Extensions of chat and completions": (CHAT & COMPLETION) - CHAT_CLIENT - COMPLETION_CLIENT,
    "Extensions of chat alone": CHAT - COMPLETION - CHAT_CLIENT,
    "Messages: Anthropic's fields": MESSAGES_CLIENT | MESSAGES,
}
CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "c"}]}
# A value of each refused field that asks for something, where text does not.
WISHES: dict[str, object] = {
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), False),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search"), True),
    "truncate_prompt_tokens": 1,
    **{name: [1] for name in ("allowed_token_ids", "functions", "documents")},
    "bad_words": ["x"],
}


def rows(title: str) -> dict[str, str]:
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    listed = ROW.findall(section)
    assert len(dict(listed)) == len(listed), "a field is listed twice"
    return dict(listed)


def test_sections_are_those_that_are_compared() -> None:
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == list(FIELDS)


@pytest.mark.parametrize("title", FIELDS)
def test_every_field_is_listed(title: str) -> None:
    assert rows(title).keys() == FIELDS[title]


def test_no_parameter_of_a_client_is_unknown() -> None:
    assert not CHAT_CLIENT - CHAT and not COMPLETION_CLIENT - COMPLETION and not MESSAGES_CLIENT - MESSAGES


@pytest.mark.parametrize("title", FIELDS)
def test_states_are_those_of_the_code(title: str) -> None:
    of_messages = "Messages" in title
    ignored = (anthropic_requests.FIELDS if of_messages else requests.CHAT_FIELDS).ignored
    for name, state in rows(title).items():
        assert state in ("implemented", "in part", "no effect", "refused")
        assert (state == "no effect") == (name in ignored), name
        assert (state == "refused") == is_refused(name, title), name


def is_refused(name: str, title: str) -> bool:
    """Whether a value that asks for something is said to be not supported."""
    prompt = {"prompt": "p"} if title.startswith("Completions") else {"messages": CHAT_BODY["messages"]}
    decode = requests.decode_completion if title.startswith("Completions") else requests.decode_chat
    body = json.dumps({"model": "m", **prompt, name: WISHES.get(name, "x")}).encode()
    try:
        if "Messages" in title:
            anthropic_requests.decode_body(body)
        else:
            decode(body)
    except InvalidRequest as error:
        return error.field == name and "is not supported yet" in error.message
    return False
