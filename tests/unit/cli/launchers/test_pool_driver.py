"""When the driver of a pool starts and stops workers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torchrelay.cli.launchers.pool_driver import ABSENT_S, KEEP_S, PoolDriver
from torchrelay.control.v1 import reports_pb2, scheduler_pb2

FREE, READY = reports_pb2.SlotState.STATE_FREE, reports_pb2.SlotState.STATE_READY


@dataclass
class ListedLauncher:
    """A launcher whose workers are names."""

    names: list[str] = field(default_factory=list)
    queued: list[str] = field(default_factory=list)
    num_scaled: int = 0
    num_retired: int = 0

    def members(self) -> Collection[str]:
        return tuple(self.names)

    def waiting(self) -> Collection[str]:
        return tuple(self.queued)

    def scale(self, num_slots: int) -> None:
        self.num_scaled = num_slots
        self.names += [f"w-{number}" for number in range(len(self.names), num_slots)]

    def retire(self, worker_id: str) -> None:
        self.num_retired += 1
        self.names.remove(worker_id)
        if worker_id in self.queued:
            self.queued.remove(worker_id)


def view(
    num_wanted: int, workers: dict[str, reports_pb2.SlotState.State.ValueType], loading: Collection[str] = ()
) -> scheduler_pb2.ClusterView:
    """``workers``: the states of their slots; ``loading``: workers for which a load was decided."""
    reports = [
        reports_pb2.WorkerReport(worker_id=name, slot=reports_pb2.SlotState(state=state))
        for name, state in workers.items()
    ]
    return scheduler_pb2.ClusterView(
        pools=[
            scheduler_pb2.PoolView(num_devices=1, num_wanted=num_wanted),
            scheduler_pb2.PoolView(num_devices=2, num_wanted=7),
        ],
        workers=reports,
        instances=[scheduler_pb2.InstanceView(worker_id=name) for name in loading],
    )


def test_workers_start_at_once_and_free_workers_stop_after_a_while() -> None:
    launcher = ListedLauncher()
    driver = PoolDriver("127.0.0.1:1", None, "", launcher)
    driver.follow(view(3, {}), 0.0)
    assert launcher.names == ["w-0", "w-1", "w-2"]
    lower = view(1, {"w-0": READY, "w-1": FREE, "w-2": FREE, "other": FREE}, loading=["w-1"])
    driver.follow(lower, 1.0)
    driver.follow(lower, 1.0 + KEEP_S / 2)
    assert len(launcher.names) == 3
    driver.follow(lower, 1.0 + KEEP_S)
    assert launcher.names == ["w-0", "w-1"], "only this member was free"
    driver.follow(view(2, {}), 2.0 + KEEP_S)
    driver.follow(view(0, {"w-0": FREE, "w-1": FREE}), 3.0 + KEEP_S)
    assert launcher.names == ["w-0", "w-1"], "the target was lower for too short a time"
    driver.follow(view(0, {"w-0": FREE, "w-1": FREE}), 3.0 + 2 * KEEP_S)
    assert launcher.names == []


def test_workers_that_wait_for_a_machine_stop_before_free_ones() -> None:
    launcher = ListedLauncher(["w-0", "w-1", "w-2"], queued=["w-2"])
    driver = PoolDriver("127.0.0.1:1", None, "", launcher)
    for num_wanted, left in ((2, ["w-0", "w-1"]), (1, ["w-1"])):
        lower = view(num_wanted, {"w-0": FREE, "w-1": FREE})
        driver.follow(lower, 0.0)
        driver.follow(lower, KEEP_S)
        driver.follow(view(num_wanted, {}), KEEP_S)
        assert launcher.names == left


def test_worker_that_the_scheduler_does_not_know_is_replaced() -> None:
    launcher = ListedLauncher(["w-0", "w-1", "w-2"], queued=["w-2"])
    driver = PoolDriver("127.0.0.1:1", None, "", launcher)
    driver.follow(view(3, {"w-0": READY}), 0.0)
    driver.follow(view(3, {"w-0": READY, "w-1": READY}), 1.0)
    for now in (2.0, 2.0 + ABSENT_S / 2):
        driver.follow(view(3, {"w-0": READY}), now)
    assert launcher.num_retired == 0
    driver.follow(view(3, {"w-0": READY}), 2.0 + ABSENT_S)
    assert launcher.num_retired == 1 and len(launcher.names) == 3, "and only the one that runs"
