"""How long answers decode alone between prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.scheduler.policy.dispatch.token_pause import pause_s


def test_no_pause_if_target_is_met_or_unreachable() -> None:
    assert pause_s(0.08, 0.01, tbt_target_s=0.1) == 0.0
    assert pause_s(0.5, 0.1, tbt_target_s=0.1) == 0.0


def test_prompts_keep_half_of_the_time() -> None:
    assert pause_s(0.5, 0.08, tbt_target_s=0.1) == 0.5


@given(st.floats(0.01, 1.0), st.floats(0.001, 0.2), st.floats(0.02, 0.5))
def test_tokens_are_in_time_in_the_mean(full_step_s: float, decode_step_s: float, tbt_target_s: float) -> None:
    found_s = pause_s(full_step_s, decode_step_s, tbt_target_s)
    if 0.0 < found_s < full_step_s:
        num_tokens = 1 + found_s / decode_step_s
        assert (full_step_s + found_s) / num_tokens == pytest.approx(0.85 * tbt_target_s)
