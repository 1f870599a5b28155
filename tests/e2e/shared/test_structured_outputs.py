"""Answers in a format through the whole platform, from models of random weights, with the official clients."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer

from tests.e2e.tenants import Tenant
from tests.support.completions import complete, headers
from tests.support.http import http
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }} <tool_call>{% if false %}{{ messages[0].tool_calls }}{% endif %}{% endif %}"
)


class Leg(BaseModel):
    model_config = ConfigDict(extra="forbid")
    runner: Literal["first", "last"]
    is_lit: bool


class Relay(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["torch", "baton"]
    legs: list[Leg]


TOOLS: list[Any] = [
    openai.pydantic_function_tool(Leg, name="run"),
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
BIASES = {
    "]": 12,
    "Ġ": -20,
    "Ċ": -20,
    "č": -20,
    "ĉ": -20,
}  # ends lists and leaves out space, which random weights prolong


@pytest.fixture(scope="module")
def model(platform: Platform, tenant: Tenant) -> str:
    folder = tenant.checkpoint("qwen2", tied=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return platform.upload(tenant.key, folder, "structured")


@pytest.fixture(scope="module")
def biases(tenant: Tenant, model: str) -> dict[str, int]:
    tokenizer = Tokenizer.from_file(str(tenant.checkpoint("qwen2", tied=True) / "tokenizer.json"))
    return {str(tokenizer.token_to_id(token)): bias for token, bias in BIASES.items()}


@pytest.fixture(scope="module")
def client(platform: Platform, tenant: Tenant) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{platform.http}/v1", api_key=tenant.key, max_retries=0, timeout=60)


def asked(seed: int, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"run {seed}"}], "seed": seed, "max_tokens": 300, **options}


def usage(platform: Platform, tenant: Tenant) -> int:
    total = http.get(f"{platform.http}/v1/usage", headers=headers(tenant.key)).json()["total"]
    tokens: int = total["completion_tokens"]
    return tokens


def test_answers_are_parsed_and_billed(
    platform: Platform, tenant: Tenant, client: openai.OpenAI, model: str, biases: dict[str, int]
) -> None:
    before = usage(platform, tenant)

    def ask(seed: int) -> tuple[Relay | None, int, str]:
        reply = client.chat.completions.parse(model=model, response_format=Relay, **asked(seed, logit_bias=biases))
        [choice] = reply.choices
        assert reply.usage is not None
        return choice.message.parsed, reply.usage.completion_tokens, choice.finish_reason

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(16)))
    assert {finish for _, _, finish in answers} == {"stop"} and all(parsed for parsed, _, _ in answers)
    assert {parsed.kind for parsed, _, _ in answers if parsed} == {"torch", "baton"}
    assert usage(platform, tenant) - before == sum(num_tokens for _, num_tokens, _ in answers)


def test_streamed_answer_is_the_same(client: openai.OpenAI, model: str, biases: dict[str, int]) -> None:
    body = asked(
        3,
        n=2,
        logit_bias=biases,
        response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": Relay.model_json_schema()}},
    )
    whole = client.chat.completions.create(model=model, **body)
    texts = ["", ""]
    for chunk in client.chat.completions.create(model=model, stream=True, **body):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert all(Relay.model_validate_json(text) for text in texts)


def test_formats_of_vllm(platform: Platform, tenant: Tenant, model: str) -> None:
    def text_of(prompt: str | list[int], **options: Any) -> str:
        [choice] = complete(platform, tenant.key, model, prompt, max_tokens=60, **options)["choices"]
        assert choice["finish_reason"] == "stop"
        text: str = choice["text"]
        return text

    assert text_of("p", guided_choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch("[a-f]{3}/[0-9]{2}", text_of([5, 6], guided_regex="[a-f]{3}/[0-9]{2}"))
    assert text_of("p", structured_outputs={"grammar": 'root ::= "a" [bc]{2} "ü"'})[0] == "a"
    assert text_of("p", guided_grammar='start: "x" /[yz]{4}/').startswith("x")
    assert text_of("p", ignore_eos=True, guided_json={"enum": [1, "b"]}) in ("1", '"b"')


def test_format_that_becomes_too_complex_is_the_callers_fault(platform: Platform, tenant: Tenant, model: str) -> None:
    wish = {"max_tokens": 400, "ignore_eos": True, "guided_regex": "(([a-z]{1,40}){1,40}){1,40}"}
    body = {"model": model, "prompt": "p", "seed": 1, **wish}
    refused = http.post(f"{platform.http}/v1/completions", json=body, headers=headers(tenant.key))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "guided_regex") and "too complex" in error["message"]


def test_required_and_named_tools_are_called(client: openai.OpenAI, model: str, biases: dict[str, int]) -> None:
    required = client.chat.completions.create(
        model=model, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **asked(1, logit_bias=biases)
    ).choices[0]
    assert required.finish_reason == "tool_calls" and len(required.message.tool_calls or []) == 1
    for seed in range(4):
        named = client.chat.completions.create(
            model=model,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "run"}},
            parallel_tool_calls=False,
            **asked(seed, logit_bias=biases),
        ).choices[0]
        [call] = named.message.tool_calls or []
        assert call.type == "function" and call.function.name == "run"
        assert Leg.model_validate_json(call.function.arguments)


def test_tool_of_messages_is_called(platform: Platform, tenant: Tenant, model: str) -> None:
    client = anthropic.Anthropic(base_url=platform.http, api_key=tenant.key, max_retries=0, timeout=60)
    message = client.messages.create(
        model=model,
        max_tokens=300,
        messages=[{"role": "user", "content": "run"}],
        tools=[{"name": "run", "input_schema": Leg.model_json_schema(), "strict": True}],
        tool_choice={"type": "tool", "name": "run", "disable_parallel_tool_use": True},
    )
    [block] = message.content
    assert message.stop_reason == "tool_use" and block.type == "tool_use"
    assert Leg.model_validate(block.input)
    answer = client.messages.create(
        model=model,
        max_tokens=300,
        messages=[{"role": "user", "content": "run"}],
        output_config={"format": {"type": "json_schema", "schema": Leg.model_json_schema()}},
    )
    assert answer.content[0].type == "text" and Leg.model_validate(json.loads(answer.content[0].text))


def test_unusable_format_is_refused(client: openai.OpenAI, model: str) -> None:
    faulty: dict[str, Any] = {"type": "object", "not": {}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model,
            response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": faulty}},
            **asked(1),
        )
    assert caught.value.param == "response_format" and "not" in caught.value.message
