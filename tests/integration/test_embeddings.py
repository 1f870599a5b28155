"""Embeddings by a prefill worker with a real engine: exact vectors, registers of the prompt, and no leaks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from nats.aio.msg import Msg

from tests.integration.roles_testbed import Request, RolesTestbed, running_testbed
from tests.support.wait import eventually
from tests.unit.engine.harness import Model, prompt_of
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import param_store_pb2, types_pb2

Make = Callable[..., AbstractAsyncContextManager[RolesTestbed]]


@pytest.fixture
def scene_of(tmp_path: Path, published: tuple[Path, param_store_pb2.VersionDescription], nats_url: str) -> Make:
    return partial(running_testbed, tmp_path, *published, nats_url)


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
    async with scene_of() as scene:
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
        await scene.assert_idle()


async def test_register_counts_the_prompt_alone(scene_of: Make, nats_url: str) -> None:
    async with scene_of() as scene:
        subject = Subjects(scene.prefill.worker.settings.nats_prefix).usage("gw-1")
        client = await connect(nats_url, "test")
        registers: list[pb.UsageRegister] = []

        async def note(message: Msg) -> None:
            registers.append(pb.UsageRegister.FromString(message.data))

        await client.subscribe(subject, cb=note)
        await client.flush()
        request = await embed(scene, prompt_of(100))
        await request.finished()
        await eventually(lambda: any(register.cause for register in registers))
        last = registers[-1]
        assert (last.num_prompt_tokens, last.output_position) == (100, 0)
        assert last.cause == pb.FINISH_REASON_STOP
        await client.close()


async def test_cancel_and_unknown_pooling_leave_nothing(scene_of: Make) -> None:
    async with scene_of() as scene:
        unknown = await embed(scene, prompt_of(20), pooling=99)
        await unknown.finished()
        assert "pooling" in unknown.error().message
        cancelled = [await embed(scene, prompt_of(500, salt)) for salt in range(4)]
        for request in cancelled:
            await request.streams[0].cancel(request.start.key)
        await scene.assert_idle()
