"""A completion of several prompts: the choices, bill and end of each, in one reply or stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.wait import eventually
from tests.unit.gateway.openai.test_asgi_app import events_of
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import QuotaExceeded
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.inference.parameter_ranges import MAX_PROMPTS

PROMPTS = [PROMPT, [50, 51, 52], [60, 61, 62, 63, 64]]


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_choices_of_each_prompt_follow_each_other(rig: TokenPathRig, num_choices: int) -> None:
    reply = await rig.client.completions.create(model="echo", prompt=PROMPTS, max_tokens=6, n=num_choices)
    expected = [rig.text(rig.echoed(prompt, 6, choice)) for prompt in PROMPTS for choice in range(num_choices)]
    assert [choice.text for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == list(range(len(expected)))
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (15, 6 * len(expected))
    ids = [reply.id, f"{reply.id}-1", f"{reply.id}-2"]
    assert sorted(rig.ports.settled) == ids
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        billed = [
            (each.choice, each.num_prompt_tokens, each.num_output_tokens) for each in rig.ports.settled[request_id]
        ]
        assert billed == [(choice, len(prompt), 6) for choice in range(num_choices)]
    assert not rig.ports.reserved


async def test_texts_are_answered_as_each_alone(rig: TokenPathRig) -> None:
    texts = ["one two", "three", "größer 🔥"]
    whole = await rig.client.completions.create(model="echo", prompt=texts, max_tokens=8, logprobs=1)
    for text, choice in zip(texts, whole.choices, strict=True):
        alone = await rig.client.completions.create(model="echo", prompt=text, max_tokens=8, logprobs=1)
        assert choice.model_dump(exclude={"index"}) == alone.choices[0].model_dump(exclude={"index"})


async def test_stream_has_the_events_of_every_prompt(rig: TokenPathRig) -> None:
    body = {"model": "echo", "prompt": PROMPTS, "max_tokens": 5, "n": 2, "return_token_ids": True}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await rig.http.post("/v1/completions", json=streamed)
    events = events_of(response.text)
    assert {event["id"] for event in events} == {response.headers["x-request-id"]}
    whole = (await rig.http.post("/v1/completions", json=body)).json()
    assert events[-1]["usage"] == whole["usage"]
    assert len(whole["choices"]) == 6
    for index, choice in enumerate(whole["choices"]):
        listed = [each for event in events for each in event["choices"] if each["index"] == index]
        assert "".join(each["text"] for each in listed) == choice["text"]
        assert [token for each in listed for token in each["token_ids"]] == choice["token_ids"]
        assert listed[0]["prompt_token_ids"] == choice["prompt_token_ids"] == PROMPTS[index // 2]
        assert (len(listed), listed[-1]["finish_reason"]) == (6, "length")


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        (["a"] * (MAX_PROMPTS + 1), "invalid_request", f"prompt has 33 prompts; at most {MAX_PROMPTS} are allowed"),
        (["a", [1]], "invalid_request", "prompt must be a text, a list of token ids, or a list of either"),
        (["a", 1], "invalid_request", "prompt must be a text, a list of token ids, or a list of either"),
        ([1, "a"], "invalid_request", "prompt must be a text, a list of token ids, or a list of either"),
        ([[1], [-1]], "invalid_request", "token ids must be"),
        ([[1], []], "invalid_request", "prompt"),
        (["a", ""], "invalid_request", "prompt"),
        ([[1], [1] * 512], "context_length_exceeded", "the prompt has 512 tokens"),
    ],
)
async def test_faulty_prompt_refuses_the_request(rig: TokenPathRig, prompt: Any, code: str, said: str) -> None:
    refused = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": prompt})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "prompt", code)
    assert said in error["message"]
    await eventually(lambda: not rig.ports.reserved and not rig.token_path.pipeline.requests)
    assert not any(usage.num_output_tokens for usages in rig.ports.settled.values() for usage in usages)


async def test_each_prompt_counts_in_the_limits(make_rig: MakeRig) -> None:
    rig = await make_rig(max_open_requests_per_tenant=2)
    body = {"model": "echo", "max_tokens": 2}
    refused = await rig.http.post("/v1/completions", json={**body, "prompt": PROMPTS})
    assert (refused.status_code, "max_open_requests_per_tenant" in refused.text) == (429, True)
    assert (await rig.http.post("/v1/completions", json={**body, "prompt": PROMPTS[:2]})).status_code == 200
    assert [num_prompt for num_prompt, _ in rig.ports.admitted] == [7, 3]
    assert rig.shares.requests.num_held == 0
    rig.ports.refusal = QuotaExceeded("the budget is spent")
    assert (await rig.http.post("/v1/completions", json={**body, "prompt": PROMPTS[:2]})).status_code == 403


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_ends_all_prompts(rig: TokenPathRig, stream: bool) -> None:
    for worker in rig.workers:
        worker.pause_at = 5
    body = {"model": "echo", "prompt": PROMPTS, "max_tokens": 100, "stream": stream}
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=body))
    await eventually(lambda: rig.num_accepted() == [5, 5, 5])
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: len(rig.ports.settled) == 3 and not rig.ports.reserved)
    for usages in rig.ports.settled.values():
        assert [(usage.num_output_tokens, usage.cause) for usage in usages] == [(5, FinishCause.CANCELLED)]
    await eventually(lambda: rig.token_path.admissions.num_open == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_of_one_prompt_ends_the_reply_with_its_cause(rig: TokenPathRig, stream: bool) -> None:
    for worker in rig.workers:
        worker.pause_at = 5
    body = {"model": "echo", "prompt": PROMPTS, "max_tokens": 100, "stream": stream}
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=body))
    await eventually(lambda: rig.num_accepted() == [5, 5, 5])
    next(iter(rig.token_path.pipeline.requests)).stop(QuotaExceeded("a cause"))
    response = await asking
    assert response.status_code == (200 if stream else 403)
    assert response.text.count("a cause") == 1 and "[DONE]" not in response.text
    await eventually(lambda: len(rig.ports.settled) == 3 and not rig.ports.reserved)
    assert [usages[0].num_output_tokens for usages in rig.ports.settled.values()] == [5, 5, 5]
