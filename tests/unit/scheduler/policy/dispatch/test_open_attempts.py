"""The work that open attempts have dispatched to their instances."""

from __future__ import annotations

from tests.unit.scheduler.policy.paper_cluster import a_model, an_admission
from torchrelay.scheduler.policy.dispatch.open_attempts import OpenAttempt, OpenAttempts
from torchrelay.scheduler.policy.prediction import Prediction
from torchrelay.scheduler.policy.types import AttemptKey, Placement, WorkerRef


def test_computed_attempt_binds_no_prefill_work() -> None:
    attempts = OpenAttempts()
    admission = an_admission(a_model(), "r1")
    prefill, decode = WorkerRef("w-p", "", "prefill"), WorkerRef("w-d", "", "decode")
    placement = Placement(admission.key, prefill, decode, cold=False)
    attempts.open(OpenAttempt(admission, placement, 0.0, kv_bytes=100, is_computed=True), now=0.0)
    attempts.check_integrity({"prefill": 0, "decode": 100})
    attempts.close(admission.key, now=1.0)
    attempts.check_integrity({"prefill": 0, "decode": 0})


def test_pause_ends_with_last_answer() -> None:
    """It was hidden while there was none, and the next one had it."""
    attempts, both = OpenAttempts(), WorkerRef("w", "", "both")

    def begin(request_id: str, now: float, pause_s: float = 0.0) -> AttemptKey:
        admission = an_admission(a_model(), request_id)
        placement = Placement(admission.key, both, both, False, Prediction(prefill_s=1.0, pause_s=pause_s))
        attempts.open(OpenAttempt(admission, placement, now, kv_bytes=100), now)
        return admission.key

    answer, other = begin("answer", 0.0), begin("other", 0.0)
    attempts.computed(answer, 1.0)
    attempts.computed(other, 1.0)
    prompt = begin("prompt", 2.0, pause_s=0.5)
    attempts.close(other, 2.1)
    assert attempts.at("both").queue.owes_pauses, "one answer is there yet"
    attempts.close(answer, 2.2)
    attempts.computed(prompt, 3.0)
    work = attempts.at("both")
    assert work.has_answers and not work.queue.owes_pauses
    assert work.queue.paused_s(0.01, 3.0) == 0.0
