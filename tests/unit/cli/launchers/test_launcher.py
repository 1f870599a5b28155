"""How a launcher makes jobs equal to its members, and when the driver of a pool starts and stops workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torchrelay.cli.errors import CliError
from torchrelay.cli.launchers.job_launcher import LOOK_EVERY_S, SHORT_S, STOP_S, WAIT_S, JobLauncher
from torchrelay.cli.launchers.jobs import JobError
from torchrelay.cli.launchers.pool_driver import ABSENT_S, KEEP_S, PoolDriver
from torchrelay.control.v1 import reports_pb2, scheduler_pb2

SCOPE = "node-"


class ListedJobs:
    """Jobs that are names; each with whether it runs. ``why``: the others wait."""

    output = "the list"

    def __init__(self, **jobs: bool) -> None:
        self.jobs: dict[str, bool] = jobs
        self.stopped: list[str] = []
        self.is_closed = False
        self.fault = self.why = ""

    async def listed(self) -> Mapping[str, str | None]:
        if self.fault:
            raise JobError(self.fault)
        return {name: None if is_running else self.why for name, is_running in self.jobs.items()}

    async def start(self, worker_id: str) -> None:
        self.jobs[worker_id] = False

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        self.stopped.append(f"{worker_id} at once" if at_once else worker_id)

    async def close(self) -> None:
        self.is_closed = True


async def looked_at(jobs: ListedJobs) -> tuple[JobLauncher, list[CliError]]:
    """A launcher that has seen its jobs once, and its errors."""
    errors: list[CliError] = []
    launcher = JobLauncher(jobs, SCOPE, errors.append)
    await launcher.reconcile(0.0)
    return launcher, errors


async def test_jobs_of_an_earlier_run_are_members() -> None:
    jobs = ListedJobs(first=True, second=False)
    launcher = JobLauncher(jobs, SCOPE, lambda error: None)
    launcher.scale(2)
    assert not launcher.members(), "how many there are is not known"
    assert await launcher.reconcile(0.0) == 2
    launcher.scale(2)
    assert list(launcher.members()) == ["first", "second"] == list(jobs.jobs)
    assert list(launcher.waiting()) == ["second"]


async def test_jobs_start_run_and_are_stopped_once() -> None:
    jobs = ListedJobs()
    launcher, errors = await looked_at(jobs)
    launcher.scale(2)
    assert await launcher.reconcile(0.0) == 0
    first, second = launcher.members()
    assert first.startswith(SCOPE) and list(jobs.jobs) == [first, second]
    jobs.jobs[first] = True
    await launcher.reconcile(1.0)
    assert list(launcher.waiting()) == [second]
    launcher.retire(first)
    for now in (2.0, 3.0):
        assert await launcher.reconcile(now) == 2, "its program still leaves"
    assert jobs.stopped == [first]
    await launcher.reconcile(2.0 + STOP_S)
    assert jobs.stopped == [first, f"{first} at once"] and list(launcher.members()) == [second]
    assert not errors


async def test_job_that_ends_is_no_member_and_delays_the_next_if_it_was_short() -> None:
    jobs = ListedJobs()
    launcher, errors = await looked_at(jobs)
    now = 0.0
    for delay_s in (LOOK_EVERY_S, 2 * LOOK_EVERY_S, 4 * LOOK_EVERY_S):
        launcher.scale(1)
        await launcher.reconcile(now)
        (name,) = jobs.jobs
        del jobs.jobs[name]
        await launcher.reconcile(now)
        assert not launcher.members()
        launcher.scale(1)
        await launcher.reconcile(now + delay_s - 0.1)
        assert not jobs.jobs, "it starts later"
        now += delay_s
    assert len(errors) == 3 and "the list" in errors[0].hint
    await launcher.reconcile(now)
    (name,) = jobs.jobs
    jobs.jobs[name] = True
    await launcher.reconcile(now)
    del jobs.jobs[name]
    await launcher.reconcile(now + SHORT_S)
    launcher.scale(1)
    await launcher.reconcile(now + SHORT_S)
    assert len(jobs.jobs) == 1 and len(errors) == 3, "a job that ran long is replaced at once"


async def test_engine_that_does_not_answer_changes_nothing_and_is_named_once() -> None:
    jobs = ListedJobs(first=True)
    launcher, errors = await looked_at(jobs)
    jobs.fault = "squeue failed: no controller"
    for now in (1.0, 2.0):
        assert await launcher.reconcile(now) is None
    assert list(launcher.members()) == ["first"]
    assert [error.message for error in errors] == ["squeue failed: no controller"]
    jobs.fault = ""
    assert await launcher.reconcile(3.0) == 1
    jobs.fault = "squeue failed: no controller"
    await launcher.reconcile(4.0)
    assert len(errors) == 2


async def test_why_jobs_wait_is_told_once_each_has_waited_for_a_while() -> None:
    jobs = ListedJobs(first=False, second=False, third=True)
    jobs.why = "PartitionDown"
    launcher, errors = await looked_at(jobs)
    assert launcher.waiting() == {"first": "PartitionDown", "second": "PartitionDown"}
    await launcher.reconcile(WAIT_S - 1)
    assert not errors
    for now in (WAIT_S, WAIT_S + 1):
        await launcher.reconcile(now)
    assert [error.message for error in errors] == ["2 workers waiting: PartitionDown"]
    jobs.why, jobs.jobs["first"] = "Resources", True
    await launcher.reconcile(WAIT_S + 2)
    assert [error.message for error in errors[1:]] == ["1 worker waiting: Resources"]
    assert launcher.waiting() == {"second": "Resources"}


async def test_job_that_cannot_be_stopped_holds_no_other_back() -> None:
    class Stuck(ListedJobs):
        async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
            if worker_id == "stuck":
                raise JobError("no such partition")
            await super().stop(worker_id, at_once=at_once)

    jobs = Stuck(stuck=True, other=True)
    launcher, errors = await looked_at(jobs)
    for name in ("stuck", "other"):
        launcher.retire(name)
    launcher.scale(1)
    for now in (1.0, 2.0):
        assert await launcher.reconcile(now) is not None
    [started] = launcher.members()
    assert jobs.stopped == ["other"] and jobs.jobs[started] is False
    assert ["stuck: no such partition" in str(error) for error in errors] == [True]


async def test_close_stops_all_and_waits_for_their_end() -> None:
    class Leaving(ListedJobs):
        async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
            await super().stop(worker_id, at_once=at_once)
            del self.jobs[worker_id]

    jobs = Leaving(first=True, second=False)
    launcher, errors = await looked_at(jobs)
    await launcher.close()
    assert sorted(jobs.stopped) == ["first", "second"] and jobs.is_closed and not errors


async def test_target_may_change_while_jobs_are_submitted() -> None:
    """The driver is another task: once, a change of the members then ended the platform."""

    class Slow(ListedJobs):
        async def start(self, worker_id: str) -> None:
            await super().start(worker_id)
            if len(self.jobs) == 1:
                launcher.scale(3)
                launcher.retire(tuple(launcher.members())[1])

    jobs = Slow()
    launcher, errors = await looked_at(jobs)
    launcher.scale(2)
    await launcher.reconcile(0.0)
    await launcher.reconcile(1.0)
    assert sorted(jobs.jobs) == sorted(launcher.members()) and len(jobs.jobs) == 2 and not errors


async def test_job_whose_submission_seemed_to_fail_is_not_submitted_again() -> None:
    class Deaf(ListedJobs):
        num_started = 0

        async def start(self, worker_id: str) -> None:
            self.num_started += 1
            await super().start(worker_id)
            raise JobError("sbatch takes longer than 30 s")

    jobs = Deaf()
    launcher, errors = await looked_at(jobs)
    launcher.scale(1)
    for now in (0.0, 1.0, 2.0):
        await launcher.reconcile(now)
    assert jobs.num_started == 1 and list(launcher.members()) == list(jobs.jobs) and len(errors) == 1


async def test_kill_ends_the_wait_for_jobs() -> None:
    jobs = ListedJobs(first=True)
    launcher, errors = await looked_at(jobs)
    launcher.kill()
    await launcher.close()
    assert [error.message for error in errors] == ["jobs may still run"] and jobs.is_closed


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

    def waiting(self) -> Mapping[str, str]:
        return dict.fromkeys(self.queued, "")

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
