"""The bid and the ask of a model are the numbers that decide, and no tenant sees those of another."""

from __future__ import annotations

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_copy, a_model, a_store, a_worker
from torchrelay.scheduler.policy.config import PolicyConfig, ScalingMode
from torchrelay.scheduler.policy.handlers.cluster_load import worth_lines
from torchrelay.scheduler.policy.inputs import FirstToken
from torchrelay.scheduler.policy.types import AttemptKey, Model

BUSY, WAITING, OTHER = a_model("acme/busy"), a_model("acme/waiting"), a_model("birch/other")


def one_slot(busy: Model = BUSY, **config: object) -> PaperCluster:
    """A slot whose model gets a request every 0.1 s, each of which runs on."""
    scene = PaperCluster(PolicyConfig(**config))  # type: ignore[arg-type]
    scene.settle(a_store("s", "host-1", map(a_copy, (BUSY, WAITING, OTHER))), a_worker("w"))
    for number in range(20):
        scene.admit(busy, f"r{number}")
        scene.finish_loads()
        scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        scene.pass_time(0.1)
    return scene


def told(scene: PaperCluster, model: str) -> dict[str, str]:
    return {line.label: line.text for line in worth_lines(scene.policy.state, model, scene.now)}


def test_waiting_model_names_victim_time_slice_and_bid() -> None:
    scene = one_slot()
    scene.admit(WAITING, "w")
    scene.pass_time(2.0)
    lines = told(scene, WAITING.name)
    assert list(lines) == ["bid", "victim", "why"]
    assert lines["bid"].startswith(
        "a slot for a time slice of 10 s serves 2.0 requests (1 request waiting, 0.1 more per second)"
    )
    assert lines["bid"].endswith(": 120 device seconds")
    assert lines["victim"].startswith("the slot on w, of acme/busy: it asks ") and lines["victim"].endswith(
        "against 2.0 served"
    )
    assert (
        "the time slice of that slot ends in 6 s" in lines["why"] and "it is taken in 58 s all the same" in lines["why"]
    )


def test_reason_of_the_time_slice_has_the_numbers_that_were_explained() -> None:
    scene = one_slot()
    scene.admit(WAITING, "w")
    scene.pass_time(59.9)
    asked = told(scene, WAITING.name)["victim"].partition(" late requests")[0].rpartition(" ")[2]
    scene.pass_time(0.2)
    (ended,) = scene.told("time_slice")
    assert f"{ended.fields['num_lost']:.1f}" == asked
    assert ended.reason.endswith(f"; without it {asked} requests of this model are late")


def test_busy_model_bids_for_one_more_and_asks_for_its_slot() -> None:
    scene = one_slot()
    lines = told(scene, BUSY.name)
    assert list(lines) == ["bid", "ask"]
    assert (
        lines["bid"].startswith("one more instance beside 1 saves ")
        and " and costs 1.0 (60 device seconds): " in lines["bid"]
    )
    assert "on w for a time slice costs " in lines["ask"] and lines["ask"].endswith(
        "; its own time slice goes on for 8 s"
    )


def test_competing_tenants_see_no_names_nor_counts_of_each_other() -> None:
    scene = one_slot()
    scene.admit(OTHER, "o")
    scene.pass_time(2.0)
    lines = told(scene, OTHER.name)
    assert lines["victim"] == "the slot on w, of a model of another tenant"
    assert not any("acme" in text or "busy" in text for text in lines.values())
    assert not any("birch" in text for text in told(scene, BUSY.name).values())


def test_tenants_of_the_same_files_see_no_counts_of_all_together() -> None:
    scene = one_slot()
    scene.admit(a_model("birch/busy", version_id=BUSY.version_id, pack_id=BUSY.pack_id), "b")
    for name in (BUSY.name, "birch/busy"):
        lines = told(scene, name)
        assert lines["bid"] == "its files are shared with other tenants: no numbers of all together are shown"
        assert "an undisclosed number of late requests" in lines["ask"]


def test_unused_model_bids_nothing_and_unknown_model_has_no_lines() -> None:
    scene = one_slot(idle_timeout_s=1.0)
    for number in range(20):
        scene.release(f"r{number}")
    scene.pass_time(5.0)
    assert told(scene, BUSY.name)["bid"].startswith("none: no request waits")
    assert told(scene, "acme/unknown") == {}


def test_advice_is_told_as_the_reason() -> None:
    scene = PaperCluster(PolicyConfig(scaling=ScalingMode.ADVISE)).settle(a_store("s", "host-1"), a_worker("w"))
    scene.admit(WAITING, "w")
    assert told(scene, WAITING.name)["why"].startswith("the scheduler only advises")


def test_explaining_changes_no_decision() -> None:
    plain, explained = one_slot(), one_slot()
    for scene in (plain, explained):
        scene.admit(WAITING, "w")
        for _ in range(20):
            scene.pass_time(0.5)
            if scene is explained:
                told(scene, WAITING.name)
                told(scene, BUSY.name)
    assert explained.effects == plain.effects


def test_tenant_that_asks_sees_no_model_of_the_tenant_that_called_last() -> None:
    """The name of the last caller was taken for that of the tenant that asks."""
    secret = a_model("birch/secret")
    scene = PaperCluster(PolicyConfig()).settle(a_store("s", "host-1", map(a_copy, (WAITING, secret))), a_worker("w"))
    scene.admit(secret, "busy")
    scene.finish_loads()
    scene.apply(FirstToken(AttemptKey("busy", 1)))
    scene.admit(WAITING, "own")
    shared = a_model("birch/waiting", version_id=WAITING.version_id, pack_id=WAITING.pack_id)
    scene.admit(shared, "other")
    scene.pass_time(0.5)
    text = " ".join(told(scene, WAITING.name).values())
    assert "victim" in told(scene, WAITING.name) and "birch" not in text, text
