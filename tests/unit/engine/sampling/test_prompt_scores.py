"""Log-probabilities of the prompt's tokens, compared with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.unit.engine.harness import GREEDY, Model, ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.engine.core import PromptLogprobs, StepResult

SCORED = replace(GREEDY, max_tokens=3, prompt_logprobs=4)


def parts(steps: Sequence[StepResult], group_id: str = "r/0") -> list[PromptLogprobs]:
    return [each for step in steps for each in step.prompt_logprobs if each.group_id == group_id]


@torch.no_grad()
def assert_equal_transformers(model: Model, prompt: Sequence[int], scores: Sequence[PromptLogprobs]) -> None:
    """Checks parts that follow each other, from the second token to the last."""
    logs = model.reference(torch.tensor([list(prompt)])).logits[0].float().log_softmax(-1)[:-1]
    chosen = logs.gather(1, torch.tensor(prompt[1:])[:, None]).flatten()
    position = 1
    for part in scores:
        assert part.first_position == position
        position += len(part.chosen)
    assert position == len(prompt)
    assert torch.allclose(torch.tensor([x for part in scores for x in part.chosen]), chosen, atol=1e-3)
    top = torch.tensor([x for part in scores for x in part.top]).view(-1, 4)
    assert torch.allclose(top, logs.topk(4).values, atol=1e-3)
    named = torch.tensor([x for part in scores for x in part.top_token_ids]).view(-1, 4)
    assert torch.allclose(logs.gather(1, named), top, atol=1e-3)
    ranks = torch.tensor([x for part in scores for x in part.ranks])
    # Logits that differ by rounding may swap places.
    assert ((logs > chosen[:, None] + 1e-3).sum(1) < ranks).all()
    assert (ranks <= (logs > chosen[:, None] - 1e-3).sum(1) + 1).all()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("token_budget", [16, 64])
def test_chunks_join_to_the_whole_prompt(model_of: ModelOf, family: str, token_budget: int) -> None:
    model, prompt = model_of(family), prompt_of(49)
    instance = model.instance(token_budget=token_budget)
    instance.prefill(group_of(prompt, sampling=SCORED))
    steps = run(instance)
    assert_equal_transformers(model, prompt, parts(steps))
    assert outputs(steps)["r/0", 0] == model.expected(prompt, 3)
    assert_idle(instance)


def test_cached_prompt_is_scored_whole(model_of: ModelOf) -> None:
    """The cache has no hidden states: the prompt is computed again, and nothing counts as cached."""
    model, prompt = model_of("llama"), prompt_of(70)
    instance = model.instance()
    instance.prefill(group_of(prompt, "r/0"))
    run(instance)
    instance.prefill(group_of(prompt, "r/1", replace(SCORED, prompt_logprobs=4)))
    steps = run(instance)
    assert_equal_transformers(model, prompt, parts(steps, "r/1"))
    assert next(token.num_cached for step in steps for token in step.tokens) == 0
    instance.prefill(group_of(prompt, "r/2"))
    assert next(token.num_cached for step in run(instance) for token in step.tokens) == 64


def test_scores_come_once_for_all_choices_and_not_for_forced_output(model_of: ModelOf) -> None:
    model, prompt = model_of("llama"), prompt_of(20)
    forced = model.expected(prompt, 2)
    instance = model.instance()
    instance.prefill(group_of(prompt, sampling=SCORED, forced=((), (), forced)))
    assert_equal_transformers(model, prompt, parts(run(instance)))


def test_other_groups_of_the_batch_are_not_scored(model_of: ModelOf) -> None:
    model = model_of("llama")
    instance = model.instance()
    instance.prefill(group_of(prompt_of(20, 1), "r/0"))
    instance.prefill(group_of(prompt_of(21, 2), "r/1", SCORED))
    instance.prefill(group_of((7,), "r/2", SCORED))  # nothing precedes its token
    steps = run(instance)
    assert_equal_transformers(model, prompt_of(21, 2), parts(steps, "r/1"))
    assert not parts(steps, "r/0") and not parts(steps, "r/2")
    assert len(outputs(steps)["r/0", 0]) == GREEDY.max_tokens


def test_prompt_that_runs_layer_by_layer_is_scored(model_of: ModelOf) -> None:
    model, prompt = model_of("llama"), prompt_of(40)
    instance = model.instance(loaded=False, token_budget=16)
    instance.prefill(group_of(prompt, sampling=SCORED))
    steps = []
    for segment in range(len(model.pack.manifest.segments)):
        instance.segment_ready(segment)
        steps += run(instance)
    assert any(step.ran_one_layer for step in steps)
    assert_equal_transformers(model, prompt, parts(steps))


def test_steps_with_scores_teach_no_latency(model_of: ModelOf) -> None:
    instance = model_of("llama").instance()
    instance.prefill(group_of(prompt_of(20), sampling=SCORED))
    first, *others = run(instance)
    assert first.prompt_logprobs and not first.work.num_prefilled
    assert all(step.work.num_decoding for step in others)
