"""Prompts that a loading instance begins, and prompts that leave loading instances and leaving workers, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_slot, a_store, a_worker, an_admission
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch.live_scaling import goes_before
from torchrelay.scheduler.policy.effects import Recall
from torchrelay.scheduler.policy.explain import placement_event
from torchrelay.scheduler.policy.inputs import FirstToken, Release
from torchrelay.scheduler.policy.strategies import LoadingPrompts, Strategies
from torchrelay.scheduler.policy.types import BOTH, AttemptKey, InstancePhase, ServiceClass

NUM_LAYERS = 24
STEP_S = 0.48  # of a prompt of a full step
LATENCY = LatencyModel(StepCost(0.0, STEP_S / 512, 0.0, 1000), StepCost(0.005, 1e-3, 0.0, 1000), 512)
MODEL = a_model()


class Cluster:
    """Loaded workers, and workers that have loaded ``num_layers`` in as many times 0.16 s, each on its own host."""

    def __init__(
        self,
        num_layers: int = 3,
        mode: LoadingPrompts = LoadingPrompts.MOVED,
        loaded: Sequence[str] = ("w1",),
        loading: Sequence[str] = ("w2",),
    ) -> None:
        self.scene = PaperCluster(PolicyConfig(max_instances=len(loaded) + len(loading)))
        self.scene.policy.state.strategies = Strategies(loading_prompts=mode)
        self.scene.settle(*(a_store(f"s of {worker_id}", f"h of {worker_id}") for worker_id in (*loaded, *loading)))
        self.begun_at, self._loading, self.model = self.scene.now, loading, MODEL
        for worker_id in loaded:
            self._report(worker_id, InstancePhase.READY, NUM_LAYERS)
        for worker_id in loading:
            self._report(worker_id, InstancePhase.LOADING, 0)
        self.load(num_layers)

    def _report(self, worker_id: str, phase: InstancePhase, num_ready: int) -> None:
        slot = a_slot(MODEL, f"i of {worker_id}", BOTH, phase, num_ready, NUM_LAYERS)
        self.scene.workers[worker_id] = a_worker(worker_id, f"h of {worker_id}", slot=slot, latency=LATENCY)
        self.scene.report(worker_id)

    def load(self, num_layers: int) -> None:
        """Passes the time until so many layers are loaded."""
        self.scene.now = max(self.begun_at + num_layers * 0.16, self.scene.now)
        phase = InstancePhase.READY if num_layers == NUM_LAYERS else InstancePhase.LOADING
        for worker_id in self._loading:
            self._report(worker_id, phase, num_layers)

    def answer_first(self, worker_id: str, after_s: float = STEP_S) -> None:
        """Passes some time; then the first prompt that is dispatched to the worker is computed and its answer ends."""
        self.scene.now += after_s
        self.scene.apply(Release(AttemptKey(self.at(worker_id)[0], 1), delivered=True))

    def admit(self, number: int, service_class: ServiceClass = ServiceClass.STANDARD) -> None:
        for _ in range(number):
            name = f"r{len(self.scene.opened) + len(self.waiting())}"
            self.scene.admit(self.model, name, num_prompt_tokens=512, max_tokens=1, service_class=service_class)

    def waiting(self) -> list[str]:
        return [admission.key.request_id for admission in self.scene.policy.state.queues]

    def at(self, worker_id: str) -> list[str]:
        return [key.request_id for key in self.scene.policy.state.attempts.work_of(f"i of {worker_id}").prefills]

    def recalls(self) -> list[AttemptKey]:
        return [answer.key for answer in self.scene.answers if isinstance(answer, Recall)]

    def return_recalled(self, number: int = 0) -> None:
        """Lets the gateway ask again for a recalled prompt."""
        key = self.recalls()[number]
        self.scene.apply(Release(key, delivered=False, is_recalled=True))
        self.scene.admit(self.model, key.request_id, attempt=2, num_prompt_tokens=512, max_tokens=1)


def test_loading_instance_begins_prompts_that_loaded_one_takes_over_in_order() -> None:
    cluster = Cluster()
    cluster.admit(12)
    assert cluster.at("w1") == ["r0"] and len(cluster.at("w2")) == 7, "as many as it computes while it loads"
    scene = cluster.scene
    cluster.answer_first("w1")
    r1, r2 = AttemptKey("r1", 1), AttemptKey("r2", 1)
    assert cluster.recalls() == [r1, r2], "those of the loading instance, before any that waits, for less than a step"
    assert all(answer.keeps_prompt for answer in scene.answers if isinstance(answer, Recall))
    cluster.return_recalled()
    placement = scene.placed("r1", attempt=2)
    assert placement.prefill.worker_id == "w1"
    source = placement.prompt_source
    assert source is not None and source.worker.worker_id == "w2" and source.wait_s == 0.0
    assert source.saved_s == pytest.approx(STEP_S * 6 / NUM_LAYERS, rel=0.05)
    (shown,) = [place for place in scene.opened if place.key == AttemptKey("r1", 2)]
    assert "; the layers that w2 computes save 120 ms; " in placement_event(shown).reason
    assert placement.predicted.prefill_s == pytest.approx(STEP_S * (1 - 6 / NUM_LAYERS), rel=0.05)
    assert cluster.at("w2")[:2] == ["r2", "r3"] and "r8" in cluster.at("w2"), "a prompt that waited takes its place"
    reasons = [event.reason for event in scene.told("recall")]
    assert reasons == ["w2 loads for 2.88 s more, w1 computes the other layers of attempt 1"] * 2
    scene.check()
    cluster.load(NUM_LAYERS)
    (loaded,) = [event for event in scene.events if event.topic == "instance.ready" and event.subject == "i of w2"]
    assert loaded.reason.startswith("all 24 layers loaded in ") and "; w1 took over 2 prompts with " in loaded.reason
    assert loaded.fields["num_moved"] == 2


@pytest.mark.parametrize(
    ("caps", "num_recalled"), [({"kv_share": 0.9}, 2), ({"max_concurrency": 8}, 2), ({"max_concurrency": 1}, 1)]
)
def test_loaded_instance_takes_over_prompts_within_the_limits_of_their_model(
    caps: dict[str, Any], num_recalled: int
) -> None:
    cluster = Cluster()
    cluster.model = replace(MODEL, **caps)
    cluster.admit(12)
    cluster.answer_first("w1")
    assert len(cluster.recalls()) == num_recalled and not cluster.at("w1"), "it keeps the places for them"
    cluster.return_recalled()
    assert cluster.at("w1") == ["r1"]
    cluster.scene.check()


def test_source_computes_on_until_next_worker_is_almost_free() -> None:
    cluster = Cluster(num_layers=12)
    cluster.admit(4)
    scene = cluster.scene
    scene.now += 0.1
    scene.tick()
    assert cluster.recalls() == [AttemptKey("r1", 1)], "less than a step is ahead"
    cluster.return_recalled()
    placement = scene.placed("r1", attempt=2)
    assert placement.prompt_source is not None
    assert 0.2 < placement.prompt_source.wait_s < 0.38


def test_loaded_instance_is_kept_for_recalled_prompts() -> None:
    cluster = Cluster()
    cluster.admit(12)
    cluster.answer_first("w1")
    assert len(cluster.recalls()) == 2
    cluster.admit(1)
    cluster.admit(1, ServiceClass.INTERACTIVE)
    assert cluster.at("w1") == [], "two recalled prompts fill its next step"
    for number in range(2):
        cluster.return_recalled(number)
    assert cluster.at("w1") == ["r1", "r2"]
    assert not any(instance.returning for instance in cluster.scene.policy.state.instances)


def test_no_instance_is_kept_for_requests_that_ended() -> None:
    cluster = Cluster()
    cluster.admit(3)
    cluster.answer_first("w1")
    assert cluster.recalls() == [AttemptKey("r1", 1), AttemptKey("r2", 1)]
    for key in cluster.recalls():
        cluster.scene.apply(Release(key, delivered=False))
    assert not any(instance.returning for instance in cluster.scene.policy.state.instances)
    cluster.scene.admit(MODEL, "new", num_prompt_tokens=512, max_tokens=1)
    placement = cluster.scene.placed("new")
    assert placement.prefill.worker_id == "w1"


@pytest.mark.parametrize(
    ("waits_until", "bound_until", "goes_first"),
    [(3.0, 4.0, True), (4.0, 3.0, False), (4.0, 4.0, False), (9.0, 1.0, True), (1.0, 9.0, False), (0.5, 1.0, True)],
)
def test_requests_in_time_go_before_late_ones_by_deadline(
    waits_until: float, bound_until: float, goes_first: bool
) -> None:
    waiting, bound = (an_admission(MODEL, "r", ttft_target_s=deadline) for deadline in (waits_until, bound_until))
    assert goes_before(waiting, bound, now=2.0) is goes_first
    batch = an_admission(MODEL, "r", ttft_target_s=waits_until, service_class=ServiceClass.BATCH)
    assert not goes_before(batch, bound, now=2.0)


def test_instance_with_answers_takes_one_prompt_at_a_time() -> None:
    cluster = Cluster()
    cluster.admit(12)
    cluster.scene.now += STEP_S
    cluster.scene.apply(FirstToken(AttemptKey("r0", 1)))
    assert cluster.recalls() == [AttemptKey("r1", 1)], "its answer needs a pause after each"


def test_prompt_that_loading_instance_computes_sooner_stays() -> None:
    cluster = Cluster(num_layers=23)
    cluster.admit(3)
    assert len(cluster.at("w2")) == 1
    cluster.scene.now += 0.1
    cluster.scene.tick()
    assert cluster.recalls() == []


def test_batch_work_is_not_bound_to_a_load_beyond_a_step() -> None:
    cluster = Cluster()
    cluster.admit(12, service_class=ServiceClass.BATCH)
    assert len(cluster.at("w2")) <= 1


@pytest.mark.parametrize("mode", [LoadingPrompts.NONE, LoadingPrompts.KEPT])
def test_other_strategies_move_nothing(mode: LoadingPrompts) -> None:
    cluster = Cluster(mode=mode)
    cluster.admit(12)
    cluster.scene.now += STEP_S
    cluster.scene.apply(FirstToken(AttemptKey("r0", 1)))
    assert cluster.recalls() == []
    assert (mode is LoadingPrompts.NONE) == (not cluster.at("w2"))
    cluster.load(NUM_LAYERS)
    assert cluster.at("w2"), "a loaded instance takes prompts"


def test_several_loaded_instances_take_over_from_one() -> None:
    cluster = Cluster(num_layers=12, loaded=("w0", "w1"))
    cluster.admit(9)
    assert len(cluster.at("w0")) == len(cluster.at("w1")) == 1 and len(cluster.at("w2")) == 6
    for worker_id in ("w0", "w1"):
        cluster.answer_first(worker_id, 0.5 * STEP_S)
    assert [key.request_id for key in cluster.recalls()] == [f"r{n}" for n in range(2, 8)]
    for number in range(6):
        cluster.return_recalled(number)
    assert len(cluster.at("w0")) == len(cluster.at("w1")) == 3, "less than half of each is left"
    cluster.scene.check()


def a_loading_instance(**config: object) -> PaperCluster:
    """With three prompts of 100 tokens dispatched to it; predicted to load for another 12 s."""
    scene = PaperCluster(PolicyConfig(max_instances=1, relay_bytes_per_s=2e6, **config))  # type: ignore[arg-type]
    scene.settle(a_store("s1", "host-1"), a_store("s2", "host-2"), a_worker("w1", "host-1"))
    for number in range(3):
        scene.admit(MODEL, f"r{number}")
    scene.pass_time(4.0)
    return scene


def a_newcomer_is_ready(scene: PaperCluster) -> list[AttemptKey]:
    """The prompts that are recalled for it."""
    scene.workers["w2"] = a_worker("w2", "host-2", slot=a_slot(MODEL, "i of w2"))
    scene.report("w2")
    return recalled(scene)


def recalled(scene: PaperCluster) -> list[AttemptKey]:
    return [answer.key for answer in scene.answers if isinstance(answer, Recall)]


def ask_again(scene: PaperCluster, keys: list[AttemptKey]) -> None:
    for key in keys:
        scene.apply(Release(key, delivered=False, is_recalled=True))
        scene.admit(MODEL, key.request_id, attempt=key.attempt + 1)


def test_prompt_that_begins_meanwhile_stays() -> None:
    scene = a_loading_instance()
    keys = a_newcomer_is_ready(scene)
    scene.apply(FirstToken(keys[0]))
    scene.pass_time(2.0)
    assert len(recalled(scene)) == 3
    attempt = scene.policy.state.attempts.get(keys[0])
    assert attempt is not None and attempt.is_computed


def test_recalled_request_keeps_arrival_and_is_not_refused() -> None:
    scene = a_loading_instance(queue_limit=1)
    first = a_newcomer_is_ready(scene)[0]
    arrived_at = scene.policy.state.attempts.get(first)
    assert arrived_at is not None
    del scene.workers["w2"]
    scene.pass_time(4.0)  # and the newcomer is lost again
    scene.workers["w1"] = replace(scene.workers["w1"], kv_pool_bytes=1)
    scene.report("w1")
    scene.admit(MODEL, "waits", ttft_target_s=1000.0)
    assert scene.placement("waits") is None
    scene.apply(Release(first, delivered=False, is_recalled=True))
    scene.admit(MODEL, first.request_id, attempt=2)
    assert scene.refusal(first.request_id, attempt=2) is None
    again = next(admission for admission in scene.policy.state.queues if admission.key.request_id == first.request_id)
    assert again.admitted_at == arrived_at.admission.admitted_at
    source = again.prompt_source
    assert again.was_recalled and source and (source.key, source.worker) == (first, arrived_at.placement.prefill)
    scene.admit(MODEL, "newcomer")
    assert scene.refusal("newcomer") is not None and scene.refusal(first.request_id, attempt=2) is None
    assert not scene.policy.state.membership.suspects, "its workers have not failed it"


@pytest.mark.parametrize("returns_to", ["its own worker", "another; its own is lost", "another; its own is suspected"])
def test_recalled_prompt_has_no_source_that_it_cannot_use(returns_to: str) -> None:
    scene = a_loading_instance()
    key = a_newcomer_is_ready(scene)[0]
    if returns_to.endswith("suspected"):
        scene.policy.state.membership.suspect("w1", scene.now)
    else:
        del scene.workers["w1" if returns_to.endswith("lost") else "w2"]
        scene.pass_time(4.0)
    ask_again(scene, [key])
    placement = scene.placed(key.request_id, attempt=2)
    assert placement.prefill.worker_id == ("w1" if returns_to == "its own worker" else "w2")
    assert placement.prompt_source is None


def test_prompts_on_leaving_worker_wait_for_another() -> None:
    scene = a_loading_instance()
    scene.workers["w2"] = a_worker("w2", "host-2")
    scene.report("w2")
    assert recalled(scene) == []
    scene.workers["w1"] = replace(scene.workers["w1"], is_leaving=True)
    scene.report("w1")
    keys = recalled(scene)
    assert sorted(keys) == [AttemptKey("r1", 1), AttemptKey("r2", 1)], "the first has begun"
    told = [event.reason for event in scene.told("recall")]
    assert told[0] == "attempt 1 has not begun, and w1 leaves"
    ask_again(scene, keys)
    placements = [scene.placement(key.request_id, attempt=2) for key in keys]
    assert [placement and placement.prefill.worker_id for placement in placements] == ["w2"] * 2
