"""What open attempts have bound of their instances."""

from __future__ import annotations

from tests.unit.scheduler.policy.paper_cluster import a_model, an_admission
from torchrelay.scheduler.policy.core import Placement, WorkerRef
from torchrelay.scheduler.policy.dispatch.open_attempts import OpenAttempt, OpenAttempts


def test_an_attempt_that_was_computed_before_binds_nothing_of_its_prefill_instance() -> None:
    attempts = OpenAttempts()
    admission = an_admission(a_model(), "r1")
    prefill, decode = WorkerRef("w-p", "", "prefill"), WorkerRef("w-d", "", "decode")
    placement = Placement(admission.key, prefill, decode, cold=False)
    attempts.open(OpenAttempt(admission, placement, 0.0, kv_bytes=100, is_computed=True), now=0.0)
    attempts.check_integrity({"prefill": 0, "decode": 100})
    attempts.close(admission.key, now=1.0)
    attempts.check_integrity({"prefill": 0, "decode": 0})
