"""The gRPC API: the same key, the same models, the same tokens as over REST."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.gateway_ports import KEY, PRINCIPAL
from tests.support.http2_client import http2_client
from tests.support.sample_tokenizers import EOS
from tests.support.wait import eventually
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    QueueFull,
    TorchrelayError,
    Unauthenticated,
    Unavailable,
)
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import FinishCause, ServiceClass
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.inference.v1 import inference_pb2 as pb
from torchrelay.inference.v1.inference_pb2_grpc import InferenceStub

PROMPT = [40, 41, 42, 43, 44, 45, 46]
METADATA = (("authorization", f"Bearer {KEY}"),)


@pytest.fixture
async def stub(rig: TokenPathRig) -> AsyncIterator[Any]:
    channel = open_channel(rig.grpc_address)
    yield InferenceStub(channel)
    await channel.close()


def request(**fields: Any) -> pb.GenerateRequest:
    made: dict[str, Any] = {"model": "echo", "prompt_token_ids": pb.TokenIds(ids=PROMPT), "max_tokens": 12, **fields}
    return pb.GenerateRequest(**made)


async def test_tokens_text_and_usage_stream(rig: TokenPathRig, stub: Any) -> None:
    call = stub.Generate(request(n=2, return_token_ids=True), metadata=METADATA)
    events = [event async for event in call]
    for choice in range(2):
        deltas = [delta for event in events for delta in event.choices if delta.index == choice]
        assert [token for delta in deltas for token in delta.token_ids] == rig.echoed(PROMPT, 12, choice)
        assert "".join(delta.text for delta in deltas) == rig.text(rig.echoed(PROMPT, 12, choice))
        assert deltas[-1].finish_reason == "length"
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 24, 31)
    assert events[0].request_id in rig.ports.settled


async def test_chat_text_equals_that_over_rest(rig: TokenPathRig, stub: Any) -> None:
    chat = pb.Messages(messages=[pb.Message(role="user", content="hello")])
    made = pb.GenerateRequest(model="acme/echo", chat=chat, max_tokens=9, seed=3, temperature=0, stop=["zzz"])
    text = "".join([delta.text async for event in stub.Generate(made, metadata=METADATA) for delta in event.choices])
    reply = await rig.client.chat.completions.create(
        model="acme/echo", messages=[{"role": "user", "content": "hello"}], max_tokens=9, seed=3, temperature=0
    )
    assert text == reply.choices[0].message.content


@pytest.mark.parametrize(
    ("tier", "callers", "service_class"),
    [
        ("", ServiceClass.STANDARD, ServiceClass.STANDARD),
        ("priority", ServiceClass.STANDARD, ServiceClass.INTERACTIVE),
        ("flex", ServiceClass.STANDARD, ServiceClass.BATCH),
        ("", ServiceClass.BATCH, ServiceClass.BATCH),
        ("auto", ServiceClass.INTERACTIVE, ServiceClass.INTERACTIVE),
        ("default", ServiceClass.BATCH, ServiceClass.STANDARD),
        ("flex", ServiceClass.INTERACTIVE, ServiceClass.BATCH),
    ],
)
async def test_scheduler_gets_the_service_class_over_both_apis(
    rig: TokenPathRig, stub: Any, tier: str, callers: ServiceClass, service_class: ServiceClass
) -> None:
    rig.ports.principals[KEY] = replace(PRINCIPAL, service_class=callers)
    assert [event async for event in stub.Generate(request(service_tier=tier), metadata=METADATA)]
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 1, "service_tier": tier or None}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    assert [ServiceClass(admit.service_class) for admit in rig.scheduler.admits] == [service_class] * 2


async def test_errors_keep_class_and_field(rig: TokenPathRig, stub: Any) -> None:
    async def error_of(made: pb.GenerateRequest, metadata: Any = METADATA) -> TorchrelayError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(made, metadata=metadata)))
        return error_from_rpc(caught.value)

    assert isinstance(await error_of(request(), metadata=()), Unauthenticated)
    assert isinstance(await error_of(request(model="nobody/none")), NotFound)
    for made, field in (
        (request(n=0), "n"),
        (pb.GenerateRequest(model="echo", chat=pb.Messages(messages=[pb.Message(role="usr")])), "messages"),
        (request(n=99), "n"),
        (request(temperature=3), "temperature"),
        (request(top_p=-0.1), "top_p"),
        (request(max_tokens=0), "max_tokens"),
        (request(max_tokens=100_000), "max_tokens"),
        (request(stop=[""]), "stop"),
        (request(service_tier="fast"), "service_tier"),
        (pb.GenerateRequest(model="echo"), "prompt"),
        (pb.GenerateRequest(model="echo", prompt=""), "prompt"),
        (pb.GenerateRequest(model="echo", chat=pb.Messages()), "messages"),
    ):
        error = await error_of(made)
        assert isinstance(error, InvalidRequest), (made, error)
        assert error.field == field


async def test_scheduler_refusals_carry_retry_after(rig: TokenPathRig, stub: Any) -> None:
    for reason, kind in (
        (scheduler_pb2.Refusal.REASON_QUEUE_FULL, QueueFull),
        (scheduler_pb2.Refusal.REASON_LOAD_FAILED, Unavailable),
    ):
        rig.scheduler.refusals.append(scheduler_pb2.Refusal(reason=reason, message="not now", retry_after_s=4.2))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(request(), metadata=METADATA)))
        error = error_from_rpc(caught.value)
        assert isinstance(error, kind) and error.retry_after_s == 4.2


async def test_cancelled_call_frees_the_worker(rig: TokenPathRig, stub: Any) -> None:
    rig.workers[0].pause_at = 5
    call = stub.Generate(request(max_tokens=50), metadata=METADATA)
    await anext(aiter(call))
    await eventually(lambda: rig.workers[0].num_running == 1)
    call.cancel()
    await eventually(lambda: rig.workers[0].num_running == 0)
    await eventually(lambda: not rig.ports.reserved)
    assert next(iter(rig.ports.settled.values()))[0].cause == FinishCause.CANCELLED


async def test_models_are_listed(rig: TokenPathRig, stub: Any) -> None:
    async with asyncio.timeout(5):
        reply = await stub.ListModels(pb.ListModelsRequest(), metadata=METADATA)
    assert [(model.id, model.version) for model in reply.models] == [
        ("acme/echo", "v-acme/echo"),
        ("acme/plain", "v-acme/plain"),
        ("acme/headless", "v-acme/headless"),
        ("acme/embed", "v-acme/embed"),
        ("acme/embed-raw", "v-acme/embed-raw"),
    ]
    assert reply.models[0].created_unix_s == 1_700_000_000


GENERATE, LIST = "/torchrelay.inference.v1.Inference/Generate", "/torchrelay.inference.v1.Inference/ListModels"


async def end_of_call_without_message(rig: TokenPathRig, method: str, *metadata: tuple[str, str]) -> bytes:
    """The bytes that end the call of a client that sends metadata and then nothing."""

    def attack() -> bytes:
        with http2_client(rig.grpc_address) as client:
            client.greet()
            client.open_call(1, method, *metadata)
            return client.end_of(1)

    return await asyncio.to_thread(attack)


@pytest.mark.parametrize("method", [GENERATE, LIST])
@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer tr-nobody"),)])
async def test_key_is_checked_before_the_message_arrives(
    rig: TokenPathRig, method: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    assert b"invalid_api_key" in await end_of_call_without_message(rig, method, *metadata)


@pytest.mark.parametrize("method", [GENERATE, LIST])
async def test_call_without_a_message_ends_after_the_limit(make_rig: MakeRig, method: str) -> None:
    rig = await make_rig(body_silence_s=0.5)
    end = await end_of_call_without_message(rig, method, *METADATA)
    assert b"the message did not arrive within 0.5 s" in end
    assert rig.shares.requests.num_held == 0


async def test_wait_for_a_tenants_other_messages_is_bounded(make_rig: MakeRig) -> None:
    """Silent calls of the tenant, one after the other, would otherwise delay it without end."""
    rig = await make_rig(body_silence_s=0.1)
    async with rig.shares.messages.turn(PRINCIPAL.tenant_id), rig.shares.messages.turn(PRINCIPAL.tenant_id):
        end = await end_of_call_without_message(rig, GENERATE, *METADATA)
    assert b"the message did not arrive within 0.1 s" in end


async def test_unread_answer_ends_its_request(make_rig: MakeRig) -> None:
    """The client gets the cause once it reads; until then the call counts in its tenant's share of requests."""
    rig = await make_rig(answer_silence_s=0.5)
    rig.workers[0].pause_at = rig.workers[1].pause_at = 5  # the request does not end by itself
    with http2_client(rig.grpc_address) as client:

        def ask() -> None:
            client.greet(window=0)
            client.open_call(1, GENERATE, *METADATA)
            client.send_message(1, request(max_tokens=50).SerializeToString())

        await asyncio.to_thread(ask)
        await eventually(lambda: rig.workers[0].num_running + rig.workers[1].num_running == 1)
        await eventually(lambda: rig.workers[0].num_running + rig.workers[1].num_running == 0)
        await eventually(lambda: bool(rig.ports.settled) and not rig.ports.reserved)
        assert next(iter(rig.ports.settled.values()))[0].cause == FinishCause.CANCELLED
        assert rig.shares.requests.num_held == 1
        client.widen(1, 100_000)
        assert b"nothing of the answer was taken for 0.5 s" in await asyncio.to_thread(client.end_of, 1)
    await eventually(lambda: rig.shares.requests.num_held == 0)


async def test_open_requests_per_tenant_are_bounded_over_both_apis(make_rig: MakeRig) -> None:
    rig = await make_rig(max_open_requests_per_tenant=2)
    rig.scheduler.open_gate.clear()
    async with open_channel(rig.grpc_address) as channel:
        waiting = InferenceStub(channel).Generate(request(), metadata=METADATA)
        asking = asyncio.ensure_future(rig.http.post("/v1/completions", json={"model": "echo", "prompt": "hi"}))
        await eventually(lambda: len(rig.scheduler.admits) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(InferenceStub(channel).Generate(request(), metadata=METADATA)))
        refused = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": "hi"})
        rig.scheduler.open_gate.set()
        assert [event async for event in waiting]
        assert (await asking).status_code == 200
    error = error_from_rpc(caught.value)
    assert type(error) is Overloaded and "max_open_requests_per_tenant" in error.message
    assert (refused.status_code, refused.json()["error"]["message"]) == (429, error.message)
    await eventually(lambda: rig.shares.requests.num_held == rig.shares.body_bytes.num_held == 0)


async def test_message_bytes_count_until_the_prompt_is_encoded(make_rig: MakeRig) -> None:
    rig = await make_rig(max_buffered_body_bytes_per_tenant=100)
    async with open_channel(rig.grpc_address) as channel:
        made = pb.GenerateRequest(model="echo", prompt="x" * 101)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(InferenceStub(channel).Generate(made, metadata=METADATA)))
        assert "max_buffered_body_bytes_per_tenant" in error_from_rpc(caught.value).message
        for _ in range(3):
            assert [event async for event in InferenceStub(channel).Generate(request(), metadata=METADATA)]


@pytest.mark.parametrize("api", ["grpc", "rest"])
async def test_refused_request_is_freed_without_garbage_collection(rig: TokenPathRig, api: str) -> None:
    """The next collection may come only after hundreds of megabytes."""
    gc.collect()
    gc.disable()
    try:
        async with open_channel(rig.grpc_address) as channel:
            for _ in range(3):
                if api == "rest":
                    body = {"model": "nobody/none", "prompt": "x" * 10_000}
                    assert (await rig.http.post("/v1/completions", json=body)).status_code == 404
                    continue
                made = pb.GenerateRequest(model="nobody/none", prompt="x" * 10_000)
                with pytest.raises(grpc.aio.AioRpcError):
                    await anext(aiter(InferenceStub(channel).Generate(made, metadata=METADATA)))
                del made

        def is_kept() -> bool:
            kinds = (GenerateParams, pb.GenerateRequest)
            return any(type(each) in kinds and each.model == "nobody/none" for each in gc.get_objects())

        await eventually(lambda: not is_kept())
    finally:
        gc.enable()


@pytest.mark.parametrize(("fields", "num_prompt_tokens"), [({}, 2), ({"add_special_tokens": False}, 1)])
async def test_special_tokens_are_added_unless_refused(
    make_rig: MakeRig, tokenizer_json: bytes, fields: dict[str, Any], num_prompt_tokens: int
) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    begin = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.token_to_id(EOS))])
    tokenizer.post_processor = begin
    rig = await make_rig(tokenizer=tokenizer.to_str().encode())
    channel = open_channel(rig.grpc_address)
    asked = pb.GenerateRequest(model="echo", prompt="h", max_tokens=1, **fields)
    events = [event async for event in InferenceStub(channel).Generate(asked, metadata=METADATA)]
    await channel.close()
    assert events[-1].usage.prompt_tokens == num_prompt_tokens
