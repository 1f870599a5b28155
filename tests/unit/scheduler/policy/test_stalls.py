"""The scaling stall of a model: the time in which its requests wait for a load."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, one_host

MODEL = a_model("acme/glossary", idle_timeout_s=1.0)


def stall_s(scene: PaperCluster) -> float:
    return scene.policy.state.stalls.seconds[MODEL.name]


def test_requests_stall_until_the_instance_is_loaded() -> None:
    scene = one_host("w-a")
    scene.admit(MODEL, "r1")
    scene.pass_time(0.5)
    scene.admit(MODEL, "r2")
    scene.pass_time(1.0)
    scene.finish_loads()
    assert stall_s(scene) == pytest.approx(1.5, abs=0.1)
    before = stall_s(scene)
    scene.admit(MODEL, "r3")
    scene.pass_time(1.0)
    assert stall_s(scene) == before, "an instance is loaded"


def test_a_stall_ends_with_the_last_request_that_waits() -> None:
    scene = one_host("w-a")
    scene.admit(MODEL, "r1")
    scene.pass_time(0.5)
    scene.release("r1")
    scene.pass_time(5.0)
    assert stall_s(scene) == pytest.approx(0.5, abs=0.11)
