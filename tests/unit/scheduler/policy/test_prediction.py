"""The measurements of an attempt, from the phases of its release; and the batches that predictions assume."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, two_hosts
from torchrelay.scheduler.policy.inputs import Release
from torchrelay.scheduler.policy.prediction import Outcome, outcome_of
from torchrelay.scheduler.policy.timed_phase import TimedPhase

MS = 1000


@pytest.mark.parametrize("skew_us", [0, -3_600_000_000, 50 * MS])
def test_outcome_is_independent_of_clock_skew(skew_us: int) -> None:
    phases = [
        TimedPhase("queue", 0, 5 * MS),
        TimedPhase("first_token", 5 * MS, 105 * MS),
        TimedPhase("decode", 105 * MS, 305 * MS),
        TimedPhase("prefill", 10 * MS, 100 * MS, "w-a"),
        TimedPhase("kv", 10 * MS + skew_us, 103 * MS + skew_us, "w-b"),
    ]
    outcome = outcome_of(phases, num_output_tokens=11, num_choices=1)
    assert outcome.ttft_s == pytest.approx(0.1)
    assert outcome.tbt_s == pytest.approx(0.02)
    assert outcome.kv_transfer_s == pytest.approx(0.003)
    assert outcome.ended_at == pytest.approx(0.305)
    assert outcome_of(phases, num_output_tokens=22, num_choices=2).tbt_s == pytest.approx(0.02)


def test_missing_phases_give_no_measurement() -> None:
    assert outcome_of([], 0, 1) == Outcome()
    phases = [TimedPhase("first_token", 0, MS), TimedPhase("decode", MS, MS)]
    assert outcome_of(phases, 1, 1).tbt_s is None
    late_offer = [TimedPhase("prefill", 0, 9 * MS), TimedPhase("kv", 1 * MS, 9 * MS)]
    assert outcome_of(late_offer, 1, 1).kv_transfer_s == 0.0


def test_batch_of_step_is_counted_in_choices() -> None:
    scene, model = two_hosts(), a_model()
    admission = scene.admit(model, "r1", num_choices=5)
    scene.finish_loads()
    scene.admit(model, "r2", num_choices=2)
    (first, second), attempts = (scene.placement("r1"), scene.placement("r2")), scene.policy.state.attempts
    assert first is not None and second is not None
    instance_id = first.decode.instance_id
    assert (len(attempts.at(instance_id).decodes), attempts.at(instance_id).num_choices) == (2, 7)
    assert second.predicted.tbt_s > first.predicted.tbt_s
    attempts.check_integrity({})
    scene.apply(Release(admission.key, True))
    assert (len(attempts.at(instance_id).decodes), attempts.at(instance_id).num_choices) == (1, 2)
