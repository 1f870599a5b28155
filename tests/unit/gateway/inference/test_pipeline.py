"""Deadlines of requests, by setting or gRPC call, counted from arrival, in every state."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from tests.support.gateway_ports import KEY
from tests.support.wait import eventually
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.inference.pipeline import earlier_deadline
from torchrelay.inference.v1 import inference_pb2 as pb
from torchrelay.inference.v1.inference_pb2_grpc import InferenceStub

TIMEOUT_S = 1.0
METADATA = (("authorization", f"Bearer {KEY}"),)
GRPC_REQUEST = pb.GenerateRequest(model="echo", prompt_token_ids=pb.TokenIds(ids=PROMPT), max_tokens=6)


async def load_tokenizer(rig: TokenPathRig) -> None:
    """Sends a request for the time that a first one takes, which may exceed the deadline."""
    await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 2})
    await eventually(lambda: not rig.ports.reserved)
    rig.ports.settled.clear()
    for worker in rig.workers:
        worker.starts.clear()


def deadlines(rig: TokenPathRig) -> set[int]:
    return {start.deadline_unix_ms for worker in rig.workers for _, start in worker.starts}


async def test_running_request_past_its_deadline_frees_its_worker(make_rig: MakeRig) -> None:
    rig = await make_rig(request_timeout_s=TIMEOUT_S)
    await load_tokenizer(rig)
    rig.workers[0].pause_at = 3
    began = time.time()
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 9})
    ended = time.time()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    await eventually(lambda: rig.workers[0].num_running == 0 and not rig.ports.reserved)
    assert [(usage.num_output_tokens, usage.cause) for usages in rig.ports.settled.values() for usage in usages] == [
        (3, FinishCause.ERROR)
    ]
    (deadline_ms,) = deadlines(rig)  # sent to both roles: a worker enforces it even without the gateway
    assert began + TIMEOUT_S - 0.1 <= deadline_ms / 1000 <= ended


async def test_waiting_request_past_its_deadline_is_withdrawn(make_rig: MakeRig) -> None:
    rig = await make_rig(request_timeout_s=0.2)
    rig.scheduler.open_gate.clear()
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT})
    assert response.status_code == 504
    await eventually(lambda: len(rig.scheduler.withdrawals) == 1 and not rig.ports.reserved)


async def test_grpc_deadline_reaches_the_workers(rig: TokenPathRig) -> None:
    async with open_channel(rig.grpc_address) as channel:
        generate: Any = InferenceStub(channel).Generate
        assert [event async for event in generate(GRPC_REQUEST, metadata=METADATA)]
        assert deadlines(rig) == {0}, "no deadline is none"
        rig.workers[0].starts.clear()
        began = time.time()
        assert [event async for event in generate(GRPC_REQUEST, metadata=METADATA, timeout=60)]
        (deadline_ms,) = deadlines(rig)
        assert began + 59 <= deadline_ms / 1000 <= time.time() + 61


async def test_earlier_of_two_deadlines_counts(make_rig: MakeRig) -> None:
    rig = await make_rig(request_timeout_s=TIMEOUT_S)
    await load_tokenizer(rig)
    rig.workers[0].pause_at = 3
    async with open_channel(rig.grpc_address) as channel:
        call: Any = InferenceStub(channel).Generate(GRPC_REQUEST, metadata=METADATA, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert [event async for event in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "exceeded its deadline" in (caught.value.details() or "")
    (deadline_ms,) = deadlines(rig)
    assert deadline_ms / 1000 < time.time() + 1


@pytest.mark.parametrize(
    ("callers_s", "operators_s", "expected"),
    [
        (None, 0.0, (0, False)),
        (None, 5.0, (5_000_100, False)),
        (3.0, 0.0, (3_000_100, True)),
        (3.0, 5.0, (3_000_100, True)),
        (7.0, 5.0, (5_000_100, False)),
        (5.0, 5.0, (5_000_100, False)),
        (0.0, 5.0, (100, True)),
    ],
)
def test_earlier_deadline_and_its_owner(
    callers_s: float | None, operators_s: float, expected: tuple[int, bool]
) -> None:
    assert earlier_deadline(100, callers_s, operators_s) == expected
