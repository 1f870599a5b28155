"""Messages that callers encode themselves: strings in Python can have lone surrogates, those of protobuf cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from tests.support.gateway_ports import KEY
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.gateway.grpc.message_decoder import decode
from torchrelay.inference.v1 import inference_pb2 as pb

METADATA = (("authorization", f"Bearer {KEY}"),)
PLACE = "@@@"
UNUSABLE = {"surrogate": "\ud800".encode(errors="surrogatepass"), "cut": b"\xf0\x9f\x94", "NUL": b"\0\0\0"}


def chat(role: str, content: str) -> pb.Messages:
    return pb.Messages(messages=[pb.Message(role="user", content="hello"), pb.Message(role=role, content=content)])


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
async def generate(rig: TokenPathRig) -> AsyncIterator[Any]:
    """``Generate`` with an encoded message."""
    channel = open_channel(rig.grpc_address)
    yield channel.unary_stream(
        "/torchrelay.inference.v1.Inference/Generate", response_deserializer=pb.GenerateEvent.FromString
    )
    await channel.close()


async def refusal(call: Any) -> tuple[grpc.StatusCode, str | None]:
    """The status of a call, and the field that it names."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return refused.value.code(), error_from_rpc(refused.value).field


@pytest.mark.parametrize("kind", ["surrogate", "cut"])
async def test_string_that_is_no_text_is_named(generate: Any, kind: str) -> None:
    for field, message in REQUESTS.items():
        call = generate(with_text(message, UNUSABLE[kind]), metadata=METADATA)
        assert await refusal(call) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_nul_is_text_or_refused_by_field(generate: Any) -> None:
    """As over REST: prompts and stop strings may have it, names cannot."""
    for field, message in REQUESTS.items():
        call = generate(with_text(message, UNUSABLE["NUL"]), metadata=METADATA)
        if field in ("prompt", "chat.messages.1.content", "stop.2"):
            assert [event async for event in call][-1].usage.total_tokens > 0
            continue
        code, named = await refusal(call)
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert named in (field, "messages")


async def test_malformed_messages_are_invalid(rig: TokenPathRig, generate: Any) -> None:
    assert await refusal(generate(b"\xff\xff\xff", metadata=METADATA)) == (grpc.StatusCode.INVALID_ARGUMENT, None)
    channel = open_channel(rig.grpc_address)
    list_models: Any = channel.unary_unary("/torchrelay.inference.v1.Inference/ListModels")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await list_models(b"\xff\xff\xff", metadata=METADATA)
    await channel.close()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_long_message_is_not_searched() -> None:
    encoded = with_text(pb.GenerateRequest(prompt="a" * (1 << 16), model=PLACE), UNUSABLE["surrogate"])
    with pytest.raises(InvalidRequest, match=r"the call's message is not valid: .*UTF-8") as refused:
        decode(pb.GenerateRequest, encoded)
    assert refused.value.field is None
