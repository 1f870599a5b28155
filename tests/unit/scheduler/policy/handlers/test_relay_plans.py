"""From reports to edges, and to other sources for a transfer that turned slow."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import NUM_CHUNKS, PaperCluster, a_copy, a_model, a_store, hosts
from torchrelay.control.v1.scheduler_pb2 import RelayView
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import RerouteCommand
from torchrelay.scheduler.policy.handlers import relay_plans
from torchrelay.scheduler.policy.inputs import CommandEnded, CommandOutcome, Load
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.relay.planning import TransferEdge
from torchrelay.scheduler.policy.types import REMOTE, Model, NicCounters, SourceShare, StoreStatus
from torchrelay.scheduler.service.views import relay_views

MODEL = a_model()
WHY = Reason("replicate", "one is enough")
MB = 1e6


def a_host(number: int, num_verified: int = 0, nic: NicCounters | None = None, **changes: object) -> StoreStatus:
    copies = [replace(a_copy(MODEL, num_verified), **changes)] if num_verified or changes else []  # type: ignore[arg-type]
    return replace(a_store(f"store-{number}", f"host-{number}", copies), nic=nic)


def a_cluster(*stores: StoreStatus) -> PaperCluster:
    return PaperCluster(PolicyConfig(replicate=False)).settle(*stores)


def reroutes(scene: PaperCluster) -> list[RerouteCommand]:
    return [command for command in scene.commands if isinstance(command, RerouteCommand)]


def slow_relay() -> PaperCluster:
    """store-3 follows store-1, which turns slow; store-2 has the pack as well."""
    nic = NicCounters(0, 0, 100 * MB)
    scene = a_cluster(a_host(1, NUM_CHUNKS, nic), a_host(2, NUM_CHUNKS, nic), a_host(3, 0, nic))
    (edge,) = relay_plans.plan_relay(scene.policy.state, MODEL.pack_id, MODEL.pack_bytes, ["store-3"], scene.now)
    assert edge.upstream == "store-1"
    report(scene, 0.5, SourceShare("store-1", 1, 90 * MB, True))
    assert not reroutes(scene)
    return scene


def report(scene: PaperCluster, seconds: float, *shares: SourceShare) -> None:
    scene.stores["store-3"] = a_host(3, 2, NicCounters(0, 0, 100 * MB), shares=shares)
    scene.pass_time(seconds)


def test_relay_below_half_of_plan_gets_other_source() -> None:
    scene = slow_relay()
    report(scene, 0.5, SourceShare("store-1", 1, 20 * MB, True))
    assert not reroutes(scene)  # it may be over in a moment
    report(scene, 1.0, SourceShare("store-1", 1, 20 * MB, True))
    (command,) = reroutes(scene)
    assert command.model.pack_id == MODEL.pack_id and command.urgent
    assert command.hop.store_id == "store-3" and command.hop.sources[0] == "store-2"
    assert set(command.hop.sources) == {"store-1", "store-2", REMOTE}
    (event,) = scene.told("reroute")
    assert event.topic == "relay.slow" and "20 MB/s instead of the 100 planned" in event.reason
    (transfer,) = scene.policy.state.transfers.into("store-3")
    assert next(iter(transfer.sources)) == "store-2"


def test_lack_of_better_source_is_recorded_once() -> None:
    scene = a_cluster(a_host(1, NUM_CHUNKS), a_host(3))
    relay_plans.plan_relay(scene.policy.state, MODEL.pack_id, MODEL.pack_bytes, ["store-3"], scene.now)
    report(scene, 20.0, SourceShare("store-1", 1, 1 * MB, True))
    (slow,) = scene.told(topic="relay.slow")
    assert slow.reason == "store-3 gets 1 MB/s instead of the 500 planned from store-1; no better source is known"
    assert slow.kind == "relay_slow" and slow.fields["new_sources"] == ""


def test_relays_are_seen_from_plan_to_end() -> None:
    scene = a_cluster(a_host(1, NUM_CHUNKS), a_host(3))
    state = scene.policy.state
    relay_plans.plan_relay(state, MODEL.pack_id, MODEL.pack_bytes, ["store-3"], scene.now, urgent=False, reason=WHY)
    (planned,) = relay_views(state, scene.now)
    assert planned.state == RelayView.STATE_PLANNED and not planned.urgent and planned.reason == "one is enough"
    assert [source.holder_id for source in planned.sources] == ["store-1"] and planned.model == MODEL.pack_id[:12]
    scene.admit(MODEL, "r1")  # now somebody has named it
    share = SourceShare("store-1", 8 * 1024 * 1024, 8 * 1024 * 1024, True)
    scene.stores["store-3"] = a_host(3, 2, shares=(share,), relay_begin_us=1)
    scene.pass_time(0.1)
    (running,) = relay_views(state, scene.now)
    assert running.state == RelayView.STATE_RUNNING and running.model == MODEL.name
    assert (running.num_chunks_verified, running.num_chunks, running.left_s) == (2, NUM_CHUNKS, 3.0)
    scene.pass_time(1.6)
    (slow,) = relay_views(state, scene.now)
    assert slow.state == RelayView.STATE_SLOW and 1.0 < slow.running_s < 2.0
    ended = replace(share, num_bytes=MODEL.pack_bytes, bytes_per_s=0.0, following=False)
    scene.stores["store-3"] = a_host(3, NUM_CHUNKS, shares=(ended,), relay_begin_us=1, relay_end_us=4_000_001)
    scene.pass_time(0.1)
    (finished,) = relay_views(state, scene.now)
    assert finished.state == RelayView.STATE_FINISHED and finished.running_s == 4.0
    assert finished.bytes_per_s == MODEL.pack_bytes / 4 and not finished.left_s
    scene.pass_time(10)
    assert relay_views(state, scene.now) == []
    events = [event.topic for event in scene.events if event.topic.startswith("relay.")]
    assert events == ["relay.started", "relay.slow", "relay.finished"]


def test_refused_relay_has_failed() -> None:
    scene = hosts(1, replicate=False)
    scene.obedient = False
    scene.admit(MODEL, "r1")
    instance = next(iter(scene.policy.state.instances))
    store = next(iter(scene.stores))
    scene.apply(CommandEnded(Load(instance.instance_id, store), CommandOutcome.REFUSED, "the arena is full"))
    (failed,) = scene.told(topic="relay.failed")
    assert failed.reason.endswith("ended: the arena is full") and failed.fields["error"] == "the arena is full"


def test_wake_on_host_with_pack_names_no_relay() -> None:
    scene = hosts(1, replicate=False)
    scene.hold("store-1", MODEL)
    scene.report_all()
    scene.admit(MODEL, "r1")
    (plan,) = scene.told("plan")
    (scaled,) = scene.told(topic="scale.up")
    assert plan.reason == scaled.fields["relay"] == "store-1 from its host copy"
    assert not [event for event in scene.events if event.topic.startswith("relay.")]


NIC = NicCounters(0, 0, 100 * MB)
OTHER = a_model("acme/other")


def two_packs() -> PaperCluster:
    """store-1 has both; its link carries one at full speed."""
    both = replace(a_store("store-1", "host-1", [a_copy(MODEL), a_copy(OTHER)]), nic=NIC)
    return a_cluster(both, a_host(2, nic=NIC), a_host(3, nic=NIC))


def plan(scene: PaperCluster, model: Model, store_id: str, urgent: bool = True) -> TransferEdge:
    state = scene.policy.state
    (edge,) = relay_plans.plan_relay(state, model.pack_id, model.pack_bytes, [store_id], scene.now, urgent=urgent)
    scene.commands += state.take_effects().commands
    return edge


def test_idle_copy_leaves_its_rate_to_load_on_shared_link() -> None:
    scene = two_packs()
    assert plan(scene, MODEL, "store-2", urgent=False).bytes_per_s == 100 * MB
    assert plan(scene, OTHER, "store-3").bytes_per_s == 100 * MB, "as if it were alone"
    state = scene.policy.state
    assert not relay_plans.goes_first(state, MODEL.pack_id, "store-2")
    assert relay_plans.goes_first(state, OTHER.pack_id, "store-3")
    assert not reroutes(scene), "the idle copy's store knows already that it yields"


def test_upstream_of_urgent_load_is_urgent() -> None:
    scene = a_cluster(a_host(1, NUM_CHUNKS, NIC), *(a_host(number, nic=NIC) for number in (2, 3, 4)))
    relay_plans.plan_relay(scene.policy.state, MODEL.pack_id, MODEL.pack_bytes, ["store-2"], scene.now, urgent=False)
    assert plan(scene, MODEL, "store-3").upstream == "store-2"
    assert [(each.hop.store_id, each.urgent) for each in reroutes(scene)] == [("store-2", True)]
    assert plan(scene, MODEL, "store-4").upstream == "store-3"
    assert len(reroutes(scene)) == 1
    assert all(transfer.urgent for transfer in scene.policy.state.transfers.shown(scene.now))
