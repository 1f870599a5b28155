"""How many instances of each role a model is worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Demand
from torchrelay.scheduler.policy.autoscaling.decode_demand import DecodeDemand
from torchrelay.scheduler.policy.autoscaling.sizing import sizings_of, wanted_instances
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import Role

RULES = PolicyConfig()


def crowded(num_waiting: int = 40, **changes: object) -> Demand:
    """5 requests a second of 0.1 s each, and 0.5 s to wait for them."""
    demand = Demand(
        a_model(max_instances=5), num_waiting, 0, 0.0, backlog_s=num_waiting / 10, arrivals_per_s=5.0, load=0.5
    )
    return replace(demand, target_s=0.6, **changes)  # type: ignore[arg-type]


def wanted(demand: Demand, num_instances: int, load_s: float) -> int:
    """Per role."""
    numbers = wanted_instances(demand, Counter(dict.fromkeys(Role, num_instances)), load_s, RULES)
    assert numbers[Role.PREFILL] == numbers[Role.DECODE]
    return numbers[Role.PREFILL]


def test_wanted_instances_save_more_than_they_cost() -> None:
    quiet = Demand(a_model(), 0, 0, 0.0)
    assert wanted(quiet, 1, 0.0) == 1
    assert wanted(replace(quiet, num_waiting=5), 2, 0.0) == 2  # a moment's wait is no reason
    assert wanted(crowded(12), 1, 0.5) == 2
    assert wanted(crowded(1000), 1, 0.5) == 5
    assert wanted(crowded(), 1, 12.0) == 1  # the queue is gone before it has loaded
    assert wanted(crowded(load=1.1), 1, 12.0) == 2  # this one only grows
    assert wanted(crowded(0, num_late_before=2), 1, 12.0) == 2
    assert wanted(crowded(0, num_late_before=1), 1, 12.0) == 1
    assert wanted(crowded(0, num_late_before=9), 1, 61.0) == 1  # worth less than its load


def test_answers_size_instances_that_play_both_roles() -> None:
    """Ten answers of 10 s fit an instance within the target between tokens."""
    answers = DecodeDemand(20, 10, 20, 10.0, arrivals_per_s=2.0, target_s=2.0, price_s=60.0, late_s=60.0)
    assert wanted(replace(crowded(0), answers=answers), 1, 0.5) == 2
    assert wanted(replace(crowded(0), answers=replace(answers, num_answers=5, arrivals_per_s=0.5)), 1, 0.5) == 1
    assert wanted(replace(crowded(1000), answers=answers), 1, 0.5) == 5, "prompts need more"


def test_queue_of_minutes_outweighs_any_cold_start() -> None:
    """Only one second of it was looked at, in which one more instance computes a quarter of a prompt."""
    flood = Demand(a_model(max_instances=3), 60, 0, 0.0, backlog_s=240.0, price_s=1.0, late_s=1.0, target_s=2.0)
    assert wanted(flood, 1, 0.1) == 3
    assert wanted(flood, 1, 2.0) == 3  # though the load takes longer than it is worth alone


def test_instance_savings_equal_losses_and_decrease() -> None:
    demand, lost = crowded(60), []
    for number in (1, 2, 3, 4):
        (sizing,) = sizings_of(demand, Counter(dict.fromkeys(Role, number + 1)))
        assert sizing.num_lost == demand.num_saved(number, 0.0)
        lost.append(sizing.num_lost)
    assert lost == sorted(lost, reverse=True) and lost[0] > 2 * lost[1] > 0
