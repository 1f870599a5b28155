"""Which requests are late if not all can be in time, and in which order they are served."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import a_model, an_admission
from torchrelay.scheduler.policy.queue.late_requests import TimedPrompt, fewest_late, late_rank
from torchrelay.scheduler.policy.types import AttemptKey


def prompts_of(*pairs: tuple[float, float]) -> list[TimedPrompt]:
    """Prompts with these deadlines and computation times, in the order of their deadlines."""
    ordered = sorted(pairs)
    return [TimedPrompt(AttemptKey(f"r{n}", 1), deadline, prompt_s) for n, (deadline, prompt_s) in enumerate(ordered)]


def are_in_time(prompts: list[TimedPrompt], begins_at: float) -> bool:
    """Whether all prompts are in time if an instance computes them in this order."""
    for prompt in prompts:
        begins_at += prompt.prompt_s
        if begins_at > prompt.deadline:
            return False
    return True


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 8)).map(lambda pair: (float(pair[0]), float(pair[1]))), max_size=7
    )
)
def test_choice_has_fewest_late_prompts(pairs: list[tuple[float, float]]) -> None:
    prompts = prompts_of(*pairs)
    late = fewest_late(prompts, [0.0])
    kept = [prompt for prompt in prompts if prompt.key not in late]
    assert len(late) + len(kept) == len(prompts)
    assert are_in_time(kept, 0.0)
    more = combinations(prompts, len(kept) + 1)
    assert not any(are_in_time(list(chosen), 0.0) for chosen in more)


@pytest.mark.parametrize(("free_at", "share"), [([0.0, 0.0], 1.0), ([0.0, 0.0, 0.0, 0.0], 0.5)])
def test_instances_compute_by_their_share_of_time(free_at: list[float], share: float) -> None:
    prompts = prompts_of(*((2.0, 1.0) for _ in range(5)))
    assert len(fewest_late(prompts, free_at, share)) == 2, (
        "two at a time: two and two are in time, and one begins at 1.5"
    )


def test_busy_instance_counts_from_its_free_time() -> None:
    prompts = prompts_of((2.0, 1.0), (2.0, 1.0), (3.0, 1.0))
    assert fewest_late(prompts, [0.0, 1.0]) == []
    assert len(fewest_late(prompts, [0.0, 9.0])) == 0
    assert len(fewest_late(prompts, [1.0, 9.0])) == 1


def test_started_request_is_never_late_and_counts() -> None:
    first, second = prompts_of((5.0, 5.0), (6.0, 2.0))
    assert fewest_late([first._replace(may_be_late=False), second], [0.0]) == [second.key]


def test_late_started_request_makes_no_earlier_request_late() -> None:
    first, second = prompts_of((2.0, 1.0), (3.0, 5.0))
    assert fewest_late([first, second._replace(may_be_late=False)], [0.0]) == []


def test_late_short_prompt_precedes_long_one_up_to_price() -> None:
    long_, short = (an_admission(a_model(), name) for name in ("long", "short"))
    assert late_rank(short, 0.1) < late_rank(long_, 0.5)
    much_younger = structs.replace(short, admitted_at=long_.admitted_at + 100.0)
    assert late_rank(much_younger, 0.1) > late_rank(long_, 0.5)
