"""fp32 greedy output equals transformers', token for token, on every path."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.harness import (
    GREEDY,
    ModelOf,
    assert_batch_is_exact,
    assert_idle,
    group_of,
    hand_over,
    last_logits,
    on_each_device,
    outputs,
    prompt_of,
    run,
)
from torchrelay.engine.core import GroupSpec, SamplingParams

# Roundings before a logit: embedding, final norm, and in each of 3 layers two norms, q, k, v with their rotations and
# norms, scores, shares, values and their projection, gate, up, their product, down and two sums. Each moves the logits
# by at most half of the dtype's eps relative to their size; in the worst case all move them in one direction.
NUM_ROUNDINGS = 2 + 3 * 16
OTHER_EXPERT = 0.1  # relative shift of the logits if another expert is chosen for some tokens
LENGTHS = (1, 15, 16, 17, 70)
TIED_LENGTHS = (17, 16)  # only the head differs


@on_each_device
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_single_prompt_equals_transformers(model_of: ModelOf, family: str, tied: bool, device: str) -> None:
    model = model_of(family, tied)
    instance = model.instance(device=device)
    for length in TIED_LENGTHS if tied else LENGTHS:
        prompt = prompt_of(length)
        instance.prefill(group_of(prompt))
        assert outputs(run(instance)) == {("r/0", 0): model.expected(prompt)}
    assert_idle(instance)


@on_each_device
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_chunks_equal_transformers(model_of: ModelOf, family: str, tied: bool, device: str) -> None:
    """A budget of 20 positions cuts prompts at odd places, and prefills run beside decodes of other lengths."""
    model = model_of(family, tied)
    instance = model.instance(device=device, token_budget=20, page_tokens=8)
    steps = assert_batch_is_exact(model, instance, TIED_LENGTHS if tied else LENGTHS)
    assert any(step.num_positions_prefilled and step.num_positions_decoded for step in steps)


@on_each_device
@pytest.mark.parametrize(("budget", "order"), [(512, 1), (23, -1)], ids=["in order", "backwards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_handed_over_kv_equals_transformers(
    model_of: ModelOf, family: str, budget: int, order: int, device: str
) -> None:
    """Chunks cross blocks, and the page sizes of the two sides differ."""
    model = model_of(family)
    source = model.instance(device=device, token_budget=budget, page_tokens=8, kv_block_tokens=20)
    target = model.instance(device=device, page_tokens=16)
    for length in LENGTHS:
        group = group_of(prompt_of(length))
        last, steps = hand_over(source, target, group, order)
        first = [token.token_id for token in last.tokens]
        assert last.prefilled == ("r/0",)
        assert first + outputs(steps)["r/0", 0] == model.expected(group.prompt)
        assert sum(step.num_positions_decoded for step in steps) == GREEDY.max_tokens - 1
        assert sum(step.num_positions_prefilled for step in steps) == 0
    assert_idle(source)
    assert_idle(target)


@pytest.mark.parametrize("length", [16, 21])
@pytest.mark.parametrize("handed_over", [False, True])
def test_choices_sharing_a_context_diverge(model_of: ModelOf, handed_over: bool, length: int) -> None:
    """Each choice writes to its own pages although all share the prompt's: sampled choices differ at once."""
    model = model_of()
    sampling = SamplingParams(temperature=1.5, seed=3, max_tokens=24)
    prompt = prompt_of(length)
    alone = []
    for choice in range(3):
        instance = model.instance()
        group = group_of(prompt, sampling=sampling, forced=[()] * 3)
        single = GroupSpec(group.group_id, prompt, length, sampling, (group.choices[choice],))
        instance.prefill(single)
        alone.append(outputs(run(instance))["r/0", choice])
    assert len({tuple(each) for each in alone}) == 3
    together = group_of(prompt, sampling=sampling, forced=[()] * 3)
    source, target = model.instance(), model.instance()
    if handed_over:
        last, steps = hand_over(source, target, together)
        steps = [last, *steps]
    else:
        source.prefill(together)
        steps = run(source)
    assert outputs(steps) == {("r/0", choice): alone[choice] for choice in range(3)}
    assert sum(step.num_positions_prefilled for step in steps) == (0 if handed_over else length) + (
        last.num_positions_prefilled if handed_over else 0
    )
    assert_idle(source)
    assert_idle(target)


@on_each_device
def test_different_forced_outputs_are_separate_contexts(model_of: ModelOf, device: str) -> None:
    model = model_of()
    expected = model.expected(prompt_of(17))
    group = group_of(prompt_of(17), forced=[(), expected[:3], ()])
    source, target = model.instance(device=device), model.instance(device=device)
    last, steps = hand_over(source, target, group)
    actual = outputs([last, *steps])
    assert actual == {("r/0", 0): expected, ("r/0", 1): expected[3:], ("r/0", 2): expected}


@on_each_device
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_equal_transformers(model_of: ModelOf, family: str, device: str) -> None:
    """Compares the logits of a prefill, which range over about +-10 in these models."""
    model = model_of(family)
    instance, prompt = model.instance(device=device), prompt_of(40)
    assert float((last_logits(instance, prompt) - model.logits(prompt)[0]).abs().max()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_16_bit_logits_are_as_accurate_as_transformers(
    model_of: ModelOf, family: str, dtype: str, tolerance: float
) -> None:
    """The logits of each prompt are as near to fp32 as their roundings allow. For half of the prompts they are within
    the tolerance of transformers', and on the median their errors are no larger.

    Both round, at different places. Experts magnify the roundings: in a near tie another expert is chosen.
    """
    model = model_of(family, dtype=dtype)
    instance = model.instance()
    most_off = NUM_ROUNDINGS * torch.finfo(getattr(torch, dtype)).eps / 2
    if instance.config.experts is not None:
        most_off += OTHER_EXPERT
        tolerance *= 2
    apart, errors, their_errors = [], [], []
    prompts = [prompt_of(40, salt) for salt in range(15)]
    references = zip(model.logits(*prompts), model.true_logits(*prompts), strict=True)
    for salt, (theirs, true) in enumerate(references):
        actual = last_logits(instance, prompts[salt])
        apart.append(float((actual - theirs).abs().max()))
        errors.append(float((actual - true).square().mean().sqrt()))
        their_errors.append(float((theirs - true).square().mean().sqrt()))
        assert errors[-1] < most_off * float(true.square().mean().sqrt()), f"prompt {salt}"
    assert median(apart) < tolerance
    assert median(errors) < 1.25 * median(their_errors)  # medians of so few prompts vary by a tenth
