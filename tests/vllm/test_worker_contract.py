"""The worker with each engine in its slot: the same requests have the same answers (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.integration.roles_testbed import DECODE, PREFILL, RolesTestbed, running_testbed
from tests.support.checkpoints import make_checkpoint
from tests.support.wait import eventually
from tests.unit.engine.harness import Model
from tests.unit.param_store.running_store import publish, running_store
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.engine.core import ChoiceSpec, GroupSpec, SamplingParams
from torchrelay.engine.sampling.sampler import TokenDraw, sample_tokens

PROMPTS = [[(7 * salt + 3 * index) % 250 for index in range(length)] for salt, length in enumerate((1, 33, 64, 150))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    # vLLM's attention on a CPU has no heads of fewer dimensions.
    return Model(make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", head_dim=32))


@pytest.fixture(params=["torchrelay", "vllm"])
async def scene(
    request: pytest.FixtureRequest, tmp_path: Path, model: Model, nats_url: str
) -> AsyncIterator[RolesTestbed]:
    async with running_store(tmp_path / "published") as store:
        description = await publish(store, model.folder)
    remote = tmp_path / "published" / "remote"
    async with running_testbed(
        tmp_path, remote, description, nats_url, apart=False, engine=request.param, kv_pool_bytes=8 << 20
    ) as scene:
        yield scene


async def test_greedy_tokens_equal_the_reference_also_when_resumed(scene: RolesTestbed, model: Model) -> None:
    requests = [await scene.send(scene.request(prompt, num_choices=2)) for prompt in PROMPTS]
    for request, prompt in zip(requests, PROMPTS, strict=True):
        await request.finished()
        assert request.tokens(0) == request.tokens(1) == model.expected(prompt)
        assert request.finish() == pb.FINISH_REASON_LENGTH
    resumed = scene.request(PROMPTS[1], forced=model.expected(PROMPTS[1])[:9])
    await (await scene.send(resumed)).finished()
    assert resumed.tokens() == model.expected(PROMPTS[1])[9:]
    await scene.assert_idle()


async def test_stop_tokens_logprobs_and_limits(scene: RolesTestbed, model: Model) -> None:
    expected = model.expected(PROMPTS[2])
    end = next(index for index in range(3, 24) if expected[index] not in expected[:index])
    request = scene.request(PROMPTS[2], stop_token_ids=[expected[end]], top_logprobs=3)
    await (await scene.send(request)).finished()
    assert request.tokens() == expected[: end + 1] and request.finish() == pb.FINISH_REASON_STOP
    outputs = sorted((each for each in request.outputs() if each.token_ids), key=lambda each: each.first_position)
    first = outputs[0].logprobs[0]
    true = model.logits(PROMPTS[2])[0].log_softmax(-1)
    assert list(first.top_token_ids) == true.topk(3).indices.tolist()
    assert first.chosen == pytest.approx(float(true.max()), abs=1e-4)
    await scene.assert_idle()


def sampled(model: Model, prompt: list[int], choice: int, params: SamplingParams) -> list[int]:
    """The tokens that transformers' logits give."""
    group = GroupSpec("r/0", tuple(prompt), len(prompt), params, (ChoiceSpec(choice),))
    output: list[int] = []
    while len(output) < params.max_tokens:
        draw = TokenDraw(0, group, choice, len(output), Counter(output))
        (token,) = sample_tokens(model.logits([*prompt, *output]), [draw])
        output.append(token.token_id)
    return output


async def test_sampled_tokens_equal_the_reference_also_when_resumed(scene: RolesTestbed, model: Model) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 11,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.3,
    }
    expected = [sampled(model, PROMPTS[1], choice, SamplingParams(**sampling, max_tokens=20)) for choice in range(2)]
    assert expected[0] != expected[1]
    whole = await scene.send(scene.request(PROMPTS[1], num_choices=2, max_tokens=20, **sampling))
    # The prompt of more than one step has other prompts beside it, of which each has a token of its own.
    others = [await scene.send(scene.request(prompt, max_tokens=4)) for prompt in PROMPTS]
    await whole.finished()
    assert [whole.tokens(0), whole.tokens(1)] == expected
    for other, prompt in zip(others, PROMPTS, strict=True):
        await other.finished()
        assert other.tokens() == model.expected(prompt)[:4]
    resumed = scene.request(PROMPTS[1], forced=expected[0][:9], max_tokens=20, **sampling)
    await (await scene.send(resumed)).finished()
    assert resumed.tokens() == expected[0][9:]
    await scene.assert_idle()


async def test_grammar_bounds_the_answer_also_when_resumed(scene: RolesTestbed, model: Model) -> None:
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3, "grammar": "start: /[a-d]{3}-[0-9]{4}/"}
    whole = await scene.send(scene.request(PROMPTS[1], num_choices=2, **sampling))
    plain = await scene.send(scene.request(PROMPTS[2]))
    await whole.finished()
    for choice in range(2):
        assert re.fullmatch("[a-d]{3}-[0-9]{4}", tokenizer.decode(whole.tokens(choice)))
        assert whole.finish(choice) == pb.FINISH_REASON_STOP
    resumed = scene.request(PROMPTS[1], forced=whole.tokens(0)[:5], **sampling)
    await (await scene.send(resumed)).finished()
    assert resumed.tokens() == whole.tokens(0)[5:]
    await plain.finished()
    assert plain.tokens() == model.expected(PROMPTS[2])
    await scene.assert_idle()


async def test_a_request_beyond_the_context_is_refused_alone(scene: RolesTestbed, model: Model) -> None:
    served = await scene.send(scene.request(PROMPTS[1]))
    for num_prompt_tokens, max_tokens in ((600, 1), (33, 500), (1, 100_000)):
        refused = scene.request([1] * num_prompt_tokens, max_tokens=max_tokens)
        await (await scene.send(refused)).finished()
        assert refused.error().code == pb.RunError.CODE_INTERNAL
        assert "exceed the context of 512 tokens" in refused.error().message
        await refused.cancel()
    await served.finished()
    assert served.tokens() == model.expected(PROMPTS[1])
    await scene.assert_idle()


async def test_cancel_and_deadline_leave_nothing(scene: RolesTestbed) -> None:
    cancelled = await scene.send(scene.request(PROMPTS[1], max_tokens=300))
    await eventually(cancelled.outputs, "a token")
    await cancelled.cancel()
    await scene.assert_idle()
    late = await scene.send(scene.request(PROMPTS[1], max_tokens=300, deadline_unix_ms=1))
    await late.finished()
    assert late.error().code == pb.RunError.CODE_DEADLINE
    await scene.assert_idle()


async def test_drain_lets_answers_end_and_the_slot_serves_again(scene: RolesTestbed, model: Model) -> None:
    request = await scene.send(scene.request(PROMPTS[1], max_tokens=200))
    await eventually(request.outputs, "a token")
    await scene.prefill.unload(drain_s=60)
    await request.finished()
    assert len(request.tokens()) == 200
    async with asyncio.timeout(60):
        await scene.prefill.until_free()
    await scene.prefill.load(scene.version, [PREFILL, DECODE])
    await scene.prefill.until_ready()
    again = await scene.send(scene.request(PROMPTS[0]))
    await again.finished()
    assert again.tokens() == model.expected(PROMPTS[0])
