"""The text of an answer continues its prompt's: with a tokenizer that strips the first space of what it decodes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.gateway_ports import KEY
from tests.support.sample_tokenizers import EOS, byte_fallback_tokenizer
from tests.support.wait import eventually
from tests.unit.gateway.openai.test_asgi_app import events_of
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.inference.v1 import inference_pb2 as pb
from torchrelay.inference.v1.inference_pb2_grpc import InferenceStub

ANSWER = " hello hello"  # the echo of the prompt
BODY: dict[str, Any] = {"model": "echo", "prompt": "hello hello", "max_tokens": 4}


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    tokenizer = Tokenizer.from_str(byte_fallback_tokenizer().decode())
    tokenizer.add_special_tokens([EOS])
    return await make_rig(tokenizer=tokenizer.to_str().encode())


async def test_whole_and_streamed_completion_begin_with_space(rig: TokenPathRig) -> None:
    whole = (await rig.http.post("/v1/completions", json=BODY)).json()
    assert whole["choices"][0]["text"] == ANSWER
    events = events_of((await rig.http.post("/v1/completions", json={**BODY, "stream": True})).text)
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER


async def test_each_choice_continues_prompt(rig: TokenPathRig) -> None:
    reply = (await rig.http.post("/v1/completions", json={**BODY, "n": 2})).json()
    assert [choice["text"] for choice in reply["choices"]] == [ANSWER, "llo hello he"]


async def test_chat_continues_its_template(rig: TokenPathRig) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    reply = await rig.client.chat.completions.create(model="echo", messages=messages, max_tokens=8)
    prompt = rig.tokenizer.encode("user: hello\n\nassistant: ", add_special_tokens=False).ids
    assert reply.choices[0].message.content == rig.text([*prompt, *prompt[:8]]).removeprefix(rig.text(prompt))


async def test_grpc_completion_begins_with_space(rig: TokenPathRig) -> None:
    channel = open_channel(rig.grpc_address)
    request = pb.GenerateRequest(model="echo", prompt="hello hello", max_tokens=4)
    call: Any = InferenceStub(channel).Generate(request, metadata=(("authorization", f"Bearer {KEY}"),))
    text = "".join([delta.text async for event in call for delta in event.choices])
    await channel.close()
    assert text == ANSWER


async def test_stop_string_that_begins_with_space_ends_answer(rig: TokenPathRig) -> None:
    """The worker stops computing at the same token as the gateway stops showing text."""
    reply = (await rig.http.post("/v1/completions", json={**BODY, "stop": [" he"]})).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")
    assert reply["usage"]["completion_tokens"] == 1


async def test_text_is_the_same_after_its_worker_died(rig: TokenPathRig) -> None:
    """The second attempt ends at a stop string that began in the first."""
    first, second = rig.workers
    first.pause_at = 2
    posting = asyncio.ensure_future(rig.http.post("/v1/completions", json={**BODY, "stop": [" hello he"]}))
    await eventually(lambda: rig.num_accepted() == [2])
    await first.kill()
    reply = (await posting).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")
    assert reply["usage"]["completion_tokens"] == 3
    again = [start for _, start in (*first.starts, *second.starts) if start.key.attempt == 2]
    assert {len(start.choices[0].forced_output) for start in again} == {2}
