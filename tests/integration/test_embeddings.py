"""Embeddings by a prefill worker with a real engine: exact vectors, registers of the prompt, and no leaks."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
import torch

from tests.integration.roles_testbed import Make, Request, RolesTestbed
from tests.support.wait import HANG_S
from tests.unit.engine.harness import Model, prompt_of
from torchrelay.common.net.nats_client import Subjects
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2


async def embed(scene: RolesTestbed, prompt: Sequence[int], pooling: int = types_pb2.POOLING_LAST_TOKEN) -> Request:
    """Starts an embedding at the prefill worker alone."""
    request = scene.request(prompt, max_tokens=0)
    start = pb.AttemptStart()
    start.CopyFrom(request.start)
    start.instance_id, start.pooling = scene.prefill.instance_id, pooling  # type: ignore[assignment]
    await request.streams[0].send(start)
    return request


@torch.no_grad()
def reference(model: Model, prompt: Sequence[int]) -> list[float]:
    states: list[float] = model.reference.model(torch.tensor([list(prompt)])).last_hidden_state[0, -1].tolist()
    return states


async def test_vectors_are_exact_and_need_no_decode_worker(scene_of: Make, model: Model) -> None:
    """Their registers count the prompts alone."""
    async with scene_of() as scene:
        usage = scene.prefill.worker.usage
        registers = await usage.client.subscribe(Subjects(scene.prefill.worker.settings.nats_prefix).usage("gw-1"))
        prompts = [prompt_of(length, salt) for salt, length in enumerate((1, 33, 64, 512))]
        requests = [await embed(scene, prompt) for prompt in prompts]
        answer = await scene.send(scene.request(prompt_of(40)))  # a completion beside them
        for request, prompt in zip(requests, prompts, strict=True):
            await request.finished()
            last = request.outputs()[-1]
            assert (last.finish_reason, last.num_prompt_tokens) == (pb.FINISH_REASON_STOP, len(prompt))
            assert not any(output.token_ids for output in request.outputs())
            assert [phase.name for phase in last.phases] == ["prefill"]
            vector = struct.unpack("<64f", last.embedding)
            assert vector == pytest.approx(reference(model, prompt), abs=2e-4)
        await answer.finished()
        assert answer.tokens() == model.expected(prompt_of(40))
        again = await embed(scene, prompts[2])
        await again.finished()
        assert again.outputs()[-1].num_cached_prompt_tokens == 48
        register = pb.UsageRegister()
        while register.request_id != again.start.key.request_id or not register.cause:
            register = pb.UsageRegister.FromString((await registers.next_msg(timeout=HANG_S)).data)
        assert (register.num_prompt_tokens, register.output_position) == (len(prompts[2]), 0)
        assert register.cause == pb.FINISH_REASON_STOP
        await scene.assert_idle()


async def test_cancel_and_unknown_pooling_leave_nothing(scene_of: Make) -> None:
    async with scene_of() as scene:
        unknown = await embed(scene, prompt_of(20), pooling=99)
        await unknown.finished()
        assert "pooling" in unknown.error().message
        cancelled = [await embed(scene, prompt_of(500, salt)) for salt in range(4)]
        for request in cancelled:
            await request.streams[0].cancel(request.start.key)
        await scene.assert_idle()
