"""The time of a prompt beside its steps."""

from __future__ import annotations

import random

import pytest

from torchrelay.scheduler.policy.estimates.prompt_time import UNKNOWN, PromptTimes


def test_fixed_time_is_learned_apart_from_steps() -> None:
    """As a factor alone it is too much for long prompts, and too little for short ones."""
    rng, prompt_times = random.Random(1), PromptTimes()
    for _ in range(200):
        steps_s = 0.01 * 10 ** rng.random()
        prompt_times.observe("i", steps_s, (0.005 + 0.9 * steps_s) * rng.uniform(0.8, 1.25))
    for steps_s in (0.01, 0.03, 0.1):
        assert prompt_times.of("i").alone_s(steps_s) == pytest.approx(0.005 + 0.9 * steps_s, rel=0.08)


def test_similar_prompts_do_not_make_long_one_free() -> None:
    """The factor of the steps that says most about them is 0."""
    prompt_times = PromptTimes()
    for number in range(200):
        prompt_times.observe("i", 0.01 * (1 + 0.1 * (number % 2)), 0.012 - 0.001 * (number % 2))
    assert prompt_times.of("i").alone_s(0.01) == pytest.approx(0.0115, rel=0.1)
    assert 0.5 <= prompt_times.of("i").alone_s(1.0) <= 1.5


def test_prompt_time_needs_prompts_and_ends_with_instance() -> None:
    prompt_times = PromptTimes()
    for _ in range(15):
        prompt_times.observe("i", 0.01, 0.05)
    prompt_times.observe("i", 0.0, 0.05)  # something was ahead of it
    assert prompt_times.of("i") == UNKNOWN
    prompt_times.observe("i", 0.01, 0.05)
    assert prompt_times.of("i").alone_s(0.01) == pytest.approx(0.05, rel=0.01)
    assert prompt_times.of("other") == UNKNOWN
    prompt_times.forget("i")
    assert prompt_times.of("i") == UNKNOWN
