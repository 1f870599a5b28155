"""A model whose numbers overflow: the attempt fails with that error in either role, and others are unaffected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.roles_testbed import running_testbed
from tests.support.checkpoints import make_overflowing_checkpoint
from tests.unit.engine.harness import Model, group_of, prompt_of, run
from tests.unit.param_store.running_store import publish, running_store
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.engine.core import Finish, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.mark.parametrize("apart", [True, False], ids=["two workers", "one worker"])
async def test_overflowing_logits_end_the_attempt_with_the_cause(tmp_path: Path, nats_url: str, apart: bool) -> None:
    model = Model(make_overflowing_checkpoint(tmp_path / "model"))
    known = {prompt: _alone(model, prompt) for prompt in (prompt_of(9 + salt, salt) for salt in range(40))}
    at_once = [prompt for prompt, (tokens, _) in known.items() if not tokens][:3]
    later = [prompt for prompt, (tokens, finish) in known.items() if tokens and finish is Finish.NOT_FINITE][:3]
    never = [prompt for prompt, (_, finish) in known.items() if finish is Finish.LENGTH][:3]
    assert at_once and later and never
    prompts = [*at_once, *later, *never]
    async with running_store(tmp_path / "store") as store:
        described = await publish(store, model.folder)
    async with running_testbed(tmp_path, tmp_path / "store" / "remote", described, nats_url, apart=apart) as scene:
        requests = [await scene.send(scene.request(prompt)) for prompt in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            tokens, finish = known[prompt]
            await request.finished()
            assert request.tokens() == tokens
            if finish is Finish.LENGTH:
                assert request.finish() == pb.FINISH_REASON_LENGTH
                continue
            assert request.error().code == pb.RunError.CODE_INTERNAL
            assert f"not finite (NaN or infinity) at output position {len(tokens)}" in request.error().message
            await request.cancel()  # as its gateway does
        await scene.assert_idle()


def _alone(model: Model, prompt: tuple[int, ...]) -> tuple[list[int], Finish | None]:
    instance = model.instance()
    instance.prefill(group_of(prompt, sampling=GREEDY))
    tokens = [token for step in run(instance) for token in step.tokens]
    return [token.token_id for token in tokens if token.finish is not Finish.NOT_FINITE], tokens[-1].finish
