"""The gRPC API: what it has beside the promises of all dialects, the limits of its calls, and its reflection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.gateway_ports import PRINCIPAL
from tests.support.http2_client import http2_client
from tests.support.sample_tokenizers import EOS
from tests.support.wait import eventually
from tests.unit.gateway.dialects.all_dialects import METADATA, inference_stub
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import InvalidRequest, TorchrelayError
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.grpc.message_decoder import decode
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.inference.v1 import inference_pb2 as pb

GENERATE, LIST = "/torchrelay.inference.v1.Inference/Generate", "/torchrelay.inference.v1.Inference/ListModels"


@pytest.fixture
async def stub(rig: TokenPathRig) -> AsyncIterator[Any]:
    async with inference_stub(rig) as stub:
        yield stub


def request(**fields: Any) -> pb.GenerateRequest:
    made: dict[str, Any] = {"model": "echo", "prompt_token_ids": pb.TokenIds(ids=PROMPT), "max_tokens": 12, **fields}
    return pb.GenerateRequest(**made)


def chat(role: str, content: str) -> pb.Messages:
    return pb.Messages(messages=[pb.Message(role="user", content="hello"), pb.Message(role=role, content=content)])


async def events_of(stub: Any, asked: pb.GenerateRequest) -> list[pb.GenerateEvent]:
    return [event async for event in stub.Generate(asked, metadata=METADATA)]


async def refusal_of(call: Any) -> TorchrelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_from_rpc(caught.value)


async def test_choices_stream_with_their_tokens(rig: TokenPathRig, stub: Any) -> None:
    events = await events_of(stub, request(n=2, return_token_ids=True))
    for choice in range(2):
        deltas = [delta for event in events for delta in event.choices if delta.index == choice]
        assert [token for delta in deltas for token in delta.token_ids] == rig.echoed(PROMPT, 12, choice)
        assert "".join(delta.text for delta in deltas) == rig.text(rig.echoed(PROMPT, 12, choice))
        assert deltas[-1].finish_reason == "length"


async def test_chat_is_that_over_rest(rig: TokenPathRig, stub: Any) -> None:
    made = pb.GenerateRequest(model="acme/echo", chat=chat("assistant", "hi"), max_tokens=9, seed=3, temperature=0)
    text = "".join([delta.text for event in await events_of(stub, made) for delta in event.choices])
    messages: Any = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    wishes: dict[str, Any] = {"max_tokens": 9, "seed": 3, "temperature": 0}
    reply = await rig.client.chat.completions.create(model="echo", messages=messages, **wishes)
    assert text == reply.choices[0].message.content


@pytest.mark.parametrize(("fields", "num_prompt_tokens"), [({}, 2), ({"add_special_tokens": False}, 1)])
async def test_special_tokens_are_added_unless_refused(
    make_rig: MakeRig, tokenizer_json: bytes, fields: dict[str, Any], num_prompt_tokens: int
) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    begin = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.token_to_id(EOS))])
    tokenizer.post_processor = begin
    async with inference_stub(await make_rig(tokenizer=tokenizer.to_str().encode())) as stub:
        events = await events_of(stub, pb.GenerateRequest(model="echo", prompt="h", max_tokens=1, **fields))
    assert events[-1].usage.prompt_tokens == num_prompt_tokens


async def test_models_are_listed(rig: TokenPathRig, stub: Any) -> None:
    reply = await stub.ListModels(pb.ListModelsRequest(), metadata=METADATA)
    assert [(model.id, model.version) for model in reply.models] == [
        (name, f"v-{name}") for name in rig.ports.published
    ]
    assert reply.models[0].created_unix_s == 1_700_000_000


async def test_errors_name_their_field(stub: Any) -> None:
    for made, field in (
        (request(n=99), "n"),
        (request(max_tokens=100, min_tokens=101), "min_tokens"),
        (pb.GenerateRequest(model="echo"), "prompt"),
        (pb.GenerateRequest(model="echo", prompt=""), "prompt"),
    ):
        error = await refusal_of(stub.Generate(made, metadata=METADATA))
        assert isinstance(error, InvalidRequest) and error.field == field, (made, error)


# Messages that callers encode themselves: strings in Python can have lone surrogates, those of protobuf cannot.
PLACE = "@@@"
UNUSABLE = {"surrogate": "\ud800".encode(errors="surrogatepass"), "cut": b"\xf0\x9f\x94", "NUL": b"\0\0\0"}
REQUESTS = {
    "model": pb.GenerateRequest(model=PLACE, prompt="hello"),
    "prompt": pb.GenerateRequest(model="echo", prompt=f"hello{PLACE}"),
    "chat.messages.1.role": pb.GenerateRequest(model="echo", chat=chat(PLACE, "hello")),
    "chat.messages.1.content": pb.GenerateRequest(model="echo", chat=chat("user", PLACE)),
    "stop.2": pb.GenerateRequest(model="echo", prompt="hello", stop=["a", "b", PLACE]),
    "service_tier": pb.GenerateRequest(model="echo", prompt="hello", service_tier=PLACE),
}


def with_text(message: Message, text: bytes) -> bytes:
    return message.SerializeToString().replace(PLACE.encode(), text)


@pytest.fixture
async def channel(rig: TokenPathRig) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(rig.grpc_address) as channel:
        yield channel


async def test_string_that_is_no_text_is_named(channel: grpc.aio.Channel) -> None:
    """NUL is text, as over REST: prompts and stop strings may have it, names cannot."""
    generate: Any = channel.unary_stream(GENERATE, response_deserializer=pb.GenerateEvent.FromString)
    for field, message in REQUESTS.items():
        for kind in ("surrogate", "cut"):
            error = await refusal_of(generate(with_text(message, UNUSABLE[kind]), metadata=METADATA))
            assert (type(error), error.field) == (InvalidRequest, field)
        call = generate(with_text(message, UNUSABLE["NUL"]), metadata=METADATA)
        if field in ("prompt", "chat.messages.1.content", "stop.2"):
            assert [event async for event in call][-1].usage.total_tokens > 0
            continue
        error = await refusal_of(call)
        assert error.code in ("invalid_request", "model_not_found") and error.field in (field, "messages")


async def test_malformed_messages_are_invalid(channel: grpc.aio.Channel) -> None:
    for method in (GENERATE, LIST):
        call: Any = channel.unary_stream(method)
        error = await refusal_of(call(b"\xff\xff\xff", metadata=METADATA))
        assert (type(error), error.field) == (InvalidRequest, None)


def test_long_message_is_not_searched() -> None:
    encoded = with_text(pb.GenerateRequest(prompt="a" * (1 << 16), model=PLACE), UNUSABLE["surrogate"])
    with pytest.raises(InvalidRequest, match=r"the call's message is not valid: .*UTF-8") as refused:
        decode(pb.GenerateRequest, encoded)
    assert refused.value.field is None


async def end_of_call_without_message(rig: TokenPathRig, method: str, *metadata: tuple[str, str]) -> bytes:
    """The bytes that end the call of a client that sends metadata and then nothing."""

    def attack() -> bytes:
        with http2_client(rig.grpc_address) as client:
            client.greet()
            client.open_call(1, method, *metadata)
            return client.end_of(1)

    return await asyncio.to_thread(attack)


async def test_key_is_checked_before_the_message_arrives(rig: TokenPathRig) -> None:
    for method in (GENERATE, LIST):
        for metadata in ((), (("authorization", "Bearer tr-nobody"),)):
            assert b"invalid_api_key" in await end_of_call_without_message(rig, method, *metadata)


async def test_wait_for_a_message_is_bounded(make_rig: MakeRig) -> None:
    """Also the wait for the tenant's other messages: its silent calls would otherwise delay it without end."""
    rig = await make_rig(message_timeout_s=0.1)
    for method in (GENERATE, LIST):
        end = await end_of_call_without_message(rig, method, *METADATA)
        assert b"the message did not arrive within 0.1 s" in end
        assert rig.shares.requests.num_held == 0
    async with rig.shares.messages.turn(PRINCIPAL.tenant_id), rig.shares.messages.turn(PRINCIPAL.tenant_id):
        end = await end_of_call_without_message(rig, GENERATE, *METADATA)
    assert b"the message did not arrive within 0.1 s" in end


async def test_unread_answer_ends_its_request(make_rig: MakeRig) -> None:
    """The client gets the cause once it reads; until then the call counts in its tenant's share of requests."""
    rig = await make_rig(answer_silence_s=3.0)
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
        assert b"nothing of the answer was taken for 3 s" in await asyncio.to_thread(client.end_of, 1)
    await eventually(lambda: rig.shares.requests.num_held == 0)


async def test_message_bytes_count_until_the_prompt_is_encoded(make_rig: MakeRig) -> None:
    rig = await make_rig(max_buffered_body_bytes_per_tenant=100)
    async with inference_stub(rig) as stub:
        error = await refusal_of(stub.Generate(pb.GenerateRequest(model="echo", prompt="x" * 101), metadata=METADATA))
        assert "max_buffered_body_bytes_per_tenant" in error.message
        for _ in range(3):
            assert await events_of(stub, request())


@pytest.mark.parametrize("api", ["grpc", "rest"])
async def test_refused_request_is_freed_without_garbage_collection(rig: TokenPathRig, stub: Any, api: str) -> None:
    """The next collection may come only after hundreds of megabytes."""

    def is_kept() -> bool:
        kinds = (GenerateParams, pb.GenerateRequest)
        return any(type(each) in kinds and each.model == "nobody/none" for each in gc.get_objects())

    body = {"model": "nobody/none", "prompt": "x" * 10_000}
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            if api == "rest":
                assert (await rig.http.post("/v1/completions", json=body)).status_code == 404
            else:
                with pytest.raises(grpc.aio.AioRpcError):  # a name for the error would keep the request
                    await anext(aiter(stub.Generate(pb.GenerateRequest(**body), metadata=METADATA)))  # type: ignore[arg-type]
        await eventually(lambda: not is_kept())
    finally:
        gc.enable()


V1, ALPHA = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"


async def reflected(channel: grpc.aio.Channel, service: str, *symbols: str, metadata: Any = METADATA) -> list[Any]:
    """The answers to a question for all services, and to one for each symbol."""
    call: Any = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked: list[dict[str, Any]] = [{"list_services": ""}, *({"file_containing_symbol": symbol} for symbol in symbols)]
    requests = [reflection_pb2.ServerReflectionRequest(**fields) for fields in asked]
    return [reply async for reply in call(iter(requests), metadata=metadata)]


@pytest.mark.parametrize("service", [V1, ALPHA])
async def test_reflection_shows_public_services_to_keys(channel: grpc.aio.Channel, service: str) -> None:
    symbols = ["inference.GRPCInferenceService", "torchrelay.inference.v1.Inference", "grpc.health.v1.Health"]
    listed, *described, hidden = await reflected(channel, service, *symbols, "torchrelay.control.v1.Scheduler")
    assert {entry.name for entry in listed.list_services_response.service} == {*symbols, V1, ALPHA}
    for symbol, reply in zip(symbols, described, strict=True):
        [encoded] = reply.file_descriptor_response.file_descriptor_proto
        file = FileDescriptorProto.FromString(encoded)
        assert symbol in {f"{file.package}.{each.name}" for each in file.service}
    assert hidden.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflected(channel, service, metadata=())
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
