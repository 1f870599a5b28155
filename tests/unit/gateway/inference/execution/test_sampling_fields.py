"""Sampling fields of requests as they reach both workers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gateway_ports import KEY
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.inference.v1 import inference_pb2 as pb
from torchrelay.inference.v1.inference_pb2_grpc import InferenceStub

PROMPT = [44, 41, 44, 50, 41, 41]


@pytest.mark.parametrize("penalty", [None, 1.0, 1.3])
async def test_distinct_prompt_tokens_are_sent_only_for_the_penalty(rig: TokenPathRig, penalty: float | None) -> None:
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 3, "min_tokens": 2, "repetition_penalty": penalty}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    starts = dict(start for worker in rig.workers for start in worker.starts)
    assert starts.keys() == {"prefill", "decode"} and not starts["decode"].prompt
    for start in starts.values():
        assert (start.sampling.repetition_penalty, start.sampling.min_tokens) == (penalty or 1.0, 2)
        assert list(start.distinct_prompt_tokens) == ([41, 44, 50] if penalty == 1.3 else [])


async def test_grpc_requests_have_the_fields(rig: TokenPathRig) -> None:
    channel = open_channel(rig.grpc_address)
    ids = pb.TokenIds(ids=PROMPT)
    request = pb.GenerateRequest(model="echo", prompt_token_ids=ids, max_tokens=3, min_tokens=2, repetition_penalty=1.3)
    call: Any = InferenceStub(channel).Generate(request, metadata=(("authorization", f"Bearer {KEY}"),))
    assert [event async for event in call]
    await channel.close()
    for _, start in (start for worker in rig.workers for start in worker.starts):
        assert (start.sampling.repetition_penalty, start.sampling.min_tokens) == (1.3, 2)
        assert list(start.distinct_prompt_tokens) == [41, 44, 50]


@pytest.mark.parametrize(("min_tokens", "answer"), [(0, ""), (11, "hello hello hello hello ")])
async def test_stop_strings_are_searched_after_min_tokens(rig: TokenPathRig, min_tokens: int, answer: str) -> None:
    body = {"model": "echo", "prompt": "hello ", "max_tokens": 40, "stop": "hello ", "min_tokens": min_tokens}
    reply = (await rig.http.post("/v1/completions", json=body)).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == (answer, "stop")
