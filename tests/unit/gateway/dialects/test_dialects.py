"""What all dialects promise alike: answers, ends, bills, refusals, failures, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.gateway_ports import ADMIN_KEY, KEY, PRINCIPAL
from tests.support.token_decoders import decoder_of
from tests.support.wait import HANG_S, eventually
from tests.unit.gateway.dialects.all_dialects import (
    ARGUMENTS,
    CALL,
    DIALECTS,
    FUNCTION,
    PARAMETERS,
    TEMPLATE,
    Dialect,
    Failure,
    Logprob,
    Reply,
    Wish,
    token_text,
)
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.errors import QuotaExceeded, RateLimited, Unavailable
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.control.v1.scheduler_pb2 import Refusal
from torchrelay.gateway.core import FinishCause, ServiceClass
from torchrelay.gateway.http.openapi import TOKEN_PATHS

WAYS = [(dialect, is_streamed) for dialect in DIALECTS for is_streamed in (False, True)]
WAYS.remove((DIALECTS[4], False))  # Generate only streams
WAYS_WITH_PARTS = [(dialect, is_streamed) for dialect, is_streamed in WAYS if dialect.has_parts]


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


async def billed(rig: TokenPathRig, reply: Reply) -> tuple[int, FinishCause]:
    """The output tokens and the end of the only choice on the bill of an answer."""
    await eventually(lambda: reply.request_id in rig.ports.settled)
    [usage] = rig.ports.settled[reply.request_id]
    assert usage.num_prompt_tokens == reply.num_prompt_tokens
    return usage.num_output_tokens, usage.cause


async def test_answer_has_its_text_usage_and_bill(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    for worker in rig.workers:
        worker.num_cached = 3
    wish = Wish("größer 🔥\u2028")
    num_tokens = len(rig.tokenizer.encode(wish.prompt).ids)
    for dialect, is_streamed in WAYS:
        with subtests.test(dialect.name, is_streamed=is_streamed):
            reply = await dialect.ask(rig, wish, is_streamed=is_streamed)
            assert reply.content == (wish.answer, "", (), dialect.ends[0])
            assert (reply.num_prompt_tokens, reply.num_output_tokens) == (num_tokens, num_tokens)
            assert reply.num_cached_tokens == (3 if dialect.has_cached_tokens else 0)
            assert await billed(rig, reply) == (num_tokens, FinishCause.STOP)
            await eventually(lambda: not rig.ports.reserved)


async def test_end_has_its_cause(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    tokens = rig.tokenizer.encode("one two three").ids
    for dialect, is_streamed in WAYS:
        with subtests.test(dialect.name, is_streamed=is_streamed):
            limit = await dialect.ask(rig, Wish("one two three", max_tokens=3), is_streamed=is_streamed)
            assert (limit.text, limit.end, limit.num_output_tokens) == (rig.text(tokens[:3]), dialect.ends[1], 3)
            assert await billed(rig, limit) == (3, FinishCause.LENGTH)
            stop = await dialect.ask(rig, Wish("one two three", stop=["never", " two"]), is_streamed=is_streamed)
            assert (stop.text, stop.end) == ("one", dialect.ends[2])
            assert await billed(rig, stop) == (stop.num_output_tokens, FinishCause.STOP)
            assert " two" in rig.text(tokens[: stop.num_output_tokens])
            assert " two" not in rig.text(tokens[: stop.num_output_tokens - 1]), "it is several tokens"
            for never in (["zzz"], ["onen", "a" * 512, "é"]):
                whole = await dialect.ask(rig, Wish("one two three", stop=never), is_streamed=is_streamed)
                assert (whole.text, whole.end) == ("one two three", dialect.ends[0])


@pytest.mark.parametrize("num_top", [0, 3])
async def test_tokens_have_their_logprobs(rig: TokenPathRig, num_top: int, subtests: pytest.Subtests) -> None:
    """Their bytes join to the text, without the token that ends it."""
    wish = Wish(" größer 🚀🚀", top_logprobs=num_top)
    ids, tokens = rig.tokenizer.encode(wish.prompt).ids, TokenBytes(decoder_of(rig.tokenizer))
    names = [token_text(tokens.of(token)) for token in ids]
    assert any(name.startswith("\\x") for name in names) and b"".join(map(tokens.of, ids[:-1])).decode() == wish.answer
    top = [(token_text(tokens.of(2 + place)), -0.25 * (place + 1)) for place in range(num_top)]
    expected = [Logprob(name, -place - 0.5, top) for place, name in enumerate(names)]
    for dialect, is_streamed in WAYS:
        if dialect.has_logprobs:
            with subtests.test(dialect.name, is_streamed=is_streamed):
                reply = await dialect.ask(rig, wish, is_streamed=is_streamed)
                shown = expected[:-1] if dialect.name == "responses" else expected  # of its text alone
                assert (reply.text, reply.logprobs) == (wish.answer, shown)
                plain = await dialect.ask(rig, Wish(" größer"), is_streamed=is_streamed)
                assert not plain.logprobs


async def test_calls_are_apart_from_the_text(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    weather, unknown = ("weather", ARGUMENTS), CALL.replace("weather", "other")
    for dialect, is_streamed in WAYS_WITH_PARTS:

        async def asked(
            answer: str, *, dialect: Dialect = dialect, is_streamed: bool = is_streamed, **wishes: Any
        ) -> Reply:
            reply = await dialect.ask(rig, Wish(answer, has_tool=True, **wishes), is_streamed=is_streamed)
            assert (await billed(rig, reply))[0] == reply.num_output_tokens
            return reply

        with subtests.test(dialect.name, is_streamed=is_streamed):
            ended, at_limit, _, after_calls = dialect.ends
            reply = await asked(f"I look.\n{CALL}\n{CALL}")
            assert reply.content == ("I look.", "", (weather, weather), after_calls)
            assert len({*reply.call_ids}) == 2 and all(reply.call_ids)
            for answer in (" It rains. \n", unknown[:-20]):
                assert (await asked(answer)).content == (answer, "", (), ended)
            assert (await asked(CALL, tool_choice="none")).content == (CALL, "", (), ended)
            cut = await asked(CALL, max_tokens=50)
            [(name, arguments)] = cut.calls
            assert (cut.text, cut.end, name) == ("", at_limit, "weather")
            assert arguments == "{}" or (len(arguments) > 1 and ARGUMENTS.startswith(arguments))
            cut = await asked(unknown, max_tokens=40)
            assert unknown.startswith(cut.text) and cut.text and not cut.calls


async def test_reasoning_is_apart_from_the_text(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    wish = Wish("<think>\nThe 🔥 is hot.\n</think>\n\nHot.")
    num_tokens = len(rig.tokenizer.encode(wish.prompt).ids)
    for dialect, is_streamed in WAYS_WITH_PARTS:
        with subtests.test(dialect.name, is_streamed=is_streamed):
            reply = await dialect.ask(rig, wish, is_streamed=is_streamed)
            assert reply.content == ("Hot.", "The 🔥 is hot.", (), dialect.ends[0])
            assert await billed(rig, reply) == (reply.num_output_tokens, FinishCause.STOP) == (num_tokens, "stop")


CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
SCHEMA = {"name": "weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
TALKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "[be"}, {"type": "text", "text": "brief]"}]},
            {"role": "user", "content": "[weather?]"},
            {"role": "assistant", "content": "[I look]", "reasoning_content": "Hm.", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": "[rain]"},
            {"role": "user", "content": "[and?]"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses": {
        "instructions": "[be\nbrief]",
        "input": [
            {"role": "user", "content": "[weather?]"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "[I look]"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c1", "output": "[rain]"},
            {"role": "user", "content": "[and?]"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    "/v1/messages": {
        "system": [
            {"type": "text", "text": "[be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief]"},
        ],
        "messages": [
            {"role": "user", "content": "[weather?]"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "[I look]"},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": json.loads(ARGUMENTS)},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "[rain]"}]},
                    {"type": "text", "text": "[and?]"},
                ],
            },
        ],
        "tools": [SCHEMA],
        "metadata": {"user_id": "u"},
        "max_tokens": 1,
    },
}


@pytest.mark.parametrize("path", TALKS)
@pytest.mark.parametrize("has_tools", [True, False])
async def test_conversation_reaches_the_template(rig: TokenPathRig, path: str, has_tools: bool) -> None:
    body = {"model": "echo", **TALKS[path]}
    if not has_tools:
        del body["tools"]
    assert (await rig.http.post(path, json=body)).status_code == 200
    [prompt, *_] = [list(start.prompt) for worker in rig.workers for _, start in worker.starts if start.prompt]
    called = json.dumps({"name": "weather", "arguments": json.loads(ARGUMENTS)}, ensure_ascii=False)
    expected = f"[be\nbrief][weather?][I look]<think>Hm.</think><tool_call>{called}</tool_call>[rain][and?]"
    written, shown = rig.tokenizer.decode(prompt)[: len(expected)], rig.tokenizer.decode(prompt)[len(expected) :]
    assert written == expected
    assert [tool["function"] for tool in json.loads(shown or "[]")] == [FUNCTION] * has_tools


REFUSALS: list[tuple[Any, dict[str, Any], str, str | None]] = [
    (None, {"key": "tr-none"}, "invalid_api_key", None),
    (None, {"key": ADMIN_KEY, "model": "acme/echo"}, "permission_denied", None),
    (None, {"model": "none"}, "model_not_found", None),
    (None, {"model": "other/echo"}, "model_not_found", None),
    (None, {"answer": "a " * 600}, "context_length_exceeded", None),
    (RateLimited("too many", retry_after_s=2.5), {}, "rate_limited", "3"),
    (QuotaExceeded("the budget is spent"), {}, "quota_exceeded", None),
    (Refusal(reason=Refusal.REASON_QUEUE_FULL, message="full", retry_after_s=3), {}, "queue_full", "3"),
    (Refusal(reason=Refusal.REASON_LOAD_FAILED, message="no load", retry_after_s=4.2), {}, "unavailable", "5"),
]


async def test_refusals_have_their_codes(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    for dialect, is_streamed in WAYS:
        with subtests.test(dialect.name, is_streamed=is_streamed):
            for cause, wishes, code, retry_after in REFUSALS:
                rig.ports.refusal = None if isinstance(cause, Refusal) else cause
                rig.scheduler.refusals += [cause] if isinstance(cause, Refusal) else []
                with pytest.raises(Failure) as refused:
                    await dialect.ask(rig, Wish(**{"answer": "a", **wishes}), is_streamed=is_streamed)
                assert refused.value.code == dialect.codes.get(code, code)
                if (dialect.name, is_streamed) != ("open_inference", True):  # its streams have a message alone
                    assert refused.value.retry_after == retry_after
                await eventually(lambda: not rig.ports.reserved)
            assert not any(usage.num_output_tokens for usages in rig.ports.settled.values() for usage in usages)
            await eventually(lambda: rig.shares.requests.num_held == rig.shares.body_bytes.num_held == 0)


async def test_failure_amid_an_answer_has_its_cause(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    for dialect, is_streamed in WAYS:
        with subtests.test(dialect.name, is_streamed=is_streamed):
            asking, request_id = await paused(rig, dialect, is_streamed=is_streamed)
            [request] = rig.token_path.pipeline.requests
            request.stop(Unavailable("the gateway is shutting down"))
            with pytest.raises(Failure, match=r"^the gateway is shutting down$") as failed:
                await asking
            assert failed.value.code == dialect.codes.get("unavailable", "unavailable")
            await freed(rig, request_id, FinishCause.ERROR)


async def test_client_that_leaves_pays_for_accepted_tokens(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    for dialect, is_streamed in WAYS:
        with subtests.test(dialect.name, is_streamed=is_streamed):
            asking, request_id = await paused(rig, dialect, is_streamed=is_streamed)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await freed(rig, request_id, FinishCause.CANCELLED)
            assert ("decode", (request_id, 1)) in rig.workers[0].cancelled


async def paused(rig: TokenPathRig, dialect: Dialect, *, is_streamed: bool) -> tuple[asyncio.Future[Reply], str]:
    """A request whose answer pauses after five tokens, and its id."""
    for worker in rig.workers:
        worker.pause_at = 5
    num_opened = len(rig.ports.opened)
    asking = asyncio.ensure_future(dialect.ask(rig, Wish("one two three four five"), is_streamed=is_streamed))
    await eventually(lambda: rig.num_accepted() == [5] and len(rig.ports.opened) > num_opened)
    return asking, rig.ports.opened[-1].request_id


async def freed(rig: TokenPathRig, request_id: str, cause: FinishCause) -> None:
    """Returns once a paused request has its bill and holds nothing."""
    await eventually(lambda: request_id in rig.ports.settled and not rig.ports.reserved)
    [usage] = rig.ports.settled[request_id]
    assert (usage.num_output_tokens, usage.cause) == (5, cause)
    await eventually(lambda: not any(worker.num_running for worker in rig.workers))
    await eventually(lambda: rig.token_path.admissions.num_open == 0)
    await eventually(lambda: len(rig.scheduler.releases) == len(rig.ports.settled))
    await eventually(lambda: rig.shares.requests.num_held == rig.shares.body_bytes.num_held == 0)


async def test_waiting_client_that_leaves_is_withdrawn(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    scheduler = rig.scheduler
    scheduler.open_gate.clear()
    for dialect, is_streamed in WAYS:
        with subtests.test(dialect.name, is_streamed=is_streamed):
            asking = asyncio.ensure_future(dialect.ask(rig, Wish("a"), is_streamed=is_streamed))
            await eventually(lambda: len(scheduler.admits) == len(scheduler.withdrawals) + 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: len(scheduler.withdrawals) == len(scheduler.admits) and not rig.ports.reserved)
    assert [usage.num_output_tokens for [usage] in rig.ports.settled.values()] == [0] * len(WAYS)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_client_that_leaves_before_its_prompt_is_encoded_is_not_admitted(
    rig: TokenPathRig, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt waits for a text process, or the model's tokenizer loads."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def encode(*_: object) -> None:
        begun.set()
        try:
            await asyncio.Future()
        finally:
            ended.set()

    monkeypatch.setattr("torchrelay.gateway.inference.text.prompt_encoder.PromptEncoder.encode", encode)
    [fields] = [fields for name, fields, *_ in STREAMS if name == path]
    asking = asyncio.ensure_future(rig.http.post(f"/v1/{path}", json={"model": "echo", **fields}))
    await begun.wait()
    asking.cancel()
    async with asyncio.timeout(HANG_S):
        await ended.wait()
    await eventually(lambda: rig.shares.requests.num_held == rig.shares.body_bytes.num_held == 0)
    assert not rig.ports.admitted and not rig.ports.opened


STREAMS: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, [], ": waiting"),
    ("completions", {"prompt": "a"}, [], ": waiting"),
    ("responses", {"input": "a"}, ["event: response.created", "event: response.in_progress"], ": waiting"),
    (
        "messages",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
        ["event: message_start"],
        "event: ping",
    ),
]


@pytest.mark.parametrize(("path", "fields", "first", "sign"), STREAMS, ids=[stream[0] for stream in STREAMS])
async def test_waiting_stream_has_signs_of_life(
    make_rig: MakeRig, path: str, fields: dict[str, Any], first: list[str], sign: str
) -> None:
    """While a model wakes up, and while its answer pauses."""
    rig = await make_rig(template=TEMPLATE, keep_alive_s=0.05)
    rig.workers[0].pause_at = rig.workers[1].pause_at = 1
    rig.scheduler.open_gate.clear()
    body = {"model": "echo", "stream": True, **fields}
    shown: list[str] = []
    async with rig.http.stream("POST", f"/v1/{path}", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            shown += [line] if line.startswith(("event: ", ":")) else []
            if shown.count(sign) == 2:
                rig.scheduler.open_gate.set()
            if rig.num_accepted() == [1] and shown[-1] == sign:
                rig.workers[0].resume()
                rig.workers[1].resume()
    assert shown[: len(first) + 2] == [*first, sign, sign]


TIERS: list[tuple[str | None, ServiceClass, ServiceClass]] = [
    (None, ServiceClass.STANDARD, ServiceClass.STANDARD),
    ("priority", ServiceClass.STANDARD, ServiceClass.INTERACTIVE),
    ("flex", ServiceClass.STANDARD, ServiceClass.BATCH),
    (None, ServiceClass.BATCH, ServiceClass.BATCH),
    ("auto", ServiceClass.INTERACTIVE, ServiceClass.INTERACTIVE),
    ("default", ServiceClass.BATCH, ServiceClass.STANDARD),
    ("flex", ServiceClass.INTERACTIVE, ServiceClass.BATCH),
]


async def test_scheduler_gets_the_service_class(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    for tier, callers, service_class in TIERS:
        with subtests.test(f"{tier} {callers}"):
            rig.scheduler.admits.clear()
            rig.ports.principals[KEY] = replace(PRINCIPAL, service_class=callers)
            asked = [dialect for dialect in DIALECTS if dialect.name != "messages"]  # which has tiers of its own
            for dialect in asked:
                await dialect.ask(rig, Wish("a", tier=tier), is_streamed=True)
            assert [ServiceClass(admit.service_class) for admit in rig.scheduler.admits] == [service_class] * len(asked)


async def early_refusal(rig: TokenPathRig, dialect: Dialect, *, is_streamed: bool) -> Failure:
    """The refusal of a call whose message is not read.

    grpcio's client reports an error of its own if the call ends while it still sends the message: then it asks again.
    """
    for _ in range(10):
        with pytest.raises(Failure) as refused:
            await dialect.ask(rig, Wish("a"), is_streamed=is_streamed)
        if refused.value.message != "Internal error from Core":
            break
    return refused.value


async def test_open_requests_of_a_tenant_are_bounded_over_all_dialects(make_rig: MakeRig) -> None:
    rig = await make_rig(template=TEMPLATE, max_open_requests_per_tenant=2)
    rig.scheduler.open_gate.clear()
    waiting = [asyncio.ensure_future(dialect.ask(rig, Wish("a"), is_streamed=True)) for dialect in DIALECTS[3:5]]
    await eventually(lambda: len(rig.scheduler.admits) == 2)
    for dialect, is_streamed in WAYS:
        refused = await early_refusal(rig, dialect, is_streamed=is_streamed)
        assert "max_open_requests_per_tenant" in refused.message
        assert refused.code == dialect.codes.get("overloaded", "overloaded")
    rig.scheduler.open_gate.set()
    assert [reply.text for reply in await asyncio.gather(*waiting)] == ["a", "a"]
    await eventually(lambda: rig.shares.requests.num_held == rig.shares.body_bytes.num_held == 0)


async def test_every_path_is_described(rig: TokenPathRig) -> None:
    assert rig.token_path.apps.keys() == TOKEN_PATHS.keys()
