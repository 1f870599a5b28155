"""An instance that gets the other role keeps its weights, and what was bound to it for the first role ends."""

from __future__ import annotations

import grpc
import pytest

from tests.integration.roles_testbed import DECODE, PREFILL, Make, RolesTestbed, paused
from tests.support.wait import eventually
from tests.unit.engine.harness import Model, prompt_of
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.worker.slot.slot import READY


async def reversed_scene(scene: RolesTestbed) -> RolesTestbed:
    """The two workers in each other's role."""
    other = RolesTestbed(scene.decode, scene.prefill, scene.version)
    other.streams = await other.connect()
    return other


async def test_bound_work_ends_where_it_is_when_two_workers_swap_roles(scene_of: Make, model: Model) -> None:
    """A prompt that the one has begun, two that wait there, their KV, and an answer of the other."""
    async with scene_of() as scene:
        await scene.prefill.set_roles(PREFILL)
        answering = await scene.send(scene.request(prompt_of(40, 7), max_tokens=120))
        await eventually(lambda: len(answering.tokens()) > 3)
        prompts = [prompt_of(400, salt) for salt in range(3)]
        begun = [await scene.send(scene.request(prompts[0]))]
        await eventually(lambda: bool(begun[0].outputs()), "the first chunk of its prompt")
        with paused(scene.prefill):
            begun += [await scene.send(scene.request(prompt)) for prompt in prompts[1:]]
            for worker, number, role in ((scene.prefill, 3, 0), (scene.decode, 4, 1)):
                attempts = worker.worker.roles[role].attempts
                await eventually(lambda attempts=attempts, number=number: len(attempts) == number)  # type: ignore[misc]
            await scene.prefill.set_roles(DECODE)
            await scene.decode.set_roles(PREFILL)
        late = await scene.send(scene.request(prompts[0]))
        await late.finished()
        assert late.error().code == pb.RunError.CODE_WRONG_INSTANCE, "its gateway asks for another placement"
        swapped = await reversed_scene(scene)
        new = await swapped.send(swapped.request(prompt_of(90, 9)))
        for request, prompt in zip((*begun, new), (*prompts, prompt_of(90, 9)), strict=True):
            await request.finished()
            assert request.tokens() == model.expected(prompt)
        await answering.finished()
        assert answering.tokens() == model.expected(prompt_of(40, 7), 120)
        assert scene.prefill.worker.slot.state == scene.decode.worker.slot.state == READY
        await scene.assert_idle()


async def test_recalled_prompt_is_computed_by_the_worker_that_got_the_role(scene_of: Make, model: Model) -> None:
    """The prompt waits behind another one when its worker stops prefill."""
    async with scene_of() as scene:
        ahead, behind = scene.request(prompt_of(480, 1)), scene.request(prompt_of(480, 2))
        with paused(scene.prefill):
            for request in (ahead, behind):
                await scene.send(request)
            await eventually(lambda: len(scene.prefill.worker.roles[0].attempts) == 2)
            await scene.prefill.set_roles(DECODE)
            await scene.decode.set_roles(PREFILL)
            await behind.recall()
            await eventually(lambda: len(scene.prefill.worker.roles[0].attempts) == 1)
        swapped = await reversed_scene(scene)
        again = swapped.request(prompt_of(480, 2))
        again.start.key.CopyFrom(behind.start.key)
        again.start.key.attempt += 1
        await swapped.send(again)
        for request, salt in ((ahead, 1), (again, 2)):
            await request.finished()
            assert request.tokens() == model.expected(prompt_of(480, salt))
        await scene.assert_idle()


async def test_worker_refuses_to_play_no_role(scene_of: Make) -> None:
    async with scene_of(apart=False) as scene:
        with pytest.raises(grpc.aio.AioRpcError, match="cannot play no role"):
            await scene.prefill.set_roles()
        assert set(scene.prefill.worker.slot.report().roles) == {PREFILL, DECODE}
