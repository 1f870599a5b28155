from __future__ import annotations

from torchrelay.common.liveness import EngineProgress
from torchrelay.worker.slot.engine_watch import EngineWatch


def test_an_engine_hangs_that_has_work_and_does_not_advance_beyond_what_its_step_should_take() -> None:
    watch = EngineWatch(stall_s=10.0, now=0.0)
    watch.observe(EngineProgress(5, has_work=True, expected_s=2.0), 100.0)
    watch.observe(EngineProgress(5, has_work=True, expected_s=2.0), 111.9)
    assert watch.fault(111.9) == ""
    assert watch.fault(112.1) == "the engine has work and has made no step for 12 s"
    watch.observe(EngineProgress(6, has_work=True, expected_s=2.0), 113.0)
    assert watch.fault(113.0) == ""


def test_rest_is_no_hang_however_seldom_anybody_looks() -> None:
    watch = EngineWatch(stall_s=10.0, now=0.0)
    watch.observe(EngineProgress(5, has_work=False), 1.0)
    watch.observe(EngineProgress(5, has_work=True), 10_000.0)  # its first step in hours has just begun
    assert watch.fault(10_000.0) == ""
    watch.observe(EngineProgress(5, has_work=False), 20_000.0)
    assert watch.fault(30_000.0) == ""
