"""How a launcher makes jobs equal to its members."""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.cli.errors import CliError
from torchrelay.cli.launchers.job_launcher import LOOK_EVERY_S, SHORT_S, STOP_S, JobLauncher
from torchrelay.cli.launchers.jobs import JobError

SCOPE = "node-"


class ListedJobs:
    """Jobs that are names; each with whether it runs."""

    output = "the list"

    def __init__(self, **jobs: bool) -> None:
        self.jobs: dict[str, bool] = jobs
        self.stopped: list[str] = []
        self.is_closed = False
        self.fault = ""

    async def listed(self) -> Mapping[str, bool]:
        if self.fault:
            raise JobError(self.fault)
        return dict(self.jobs)

    async def start(self, worker_id: str) -> None:
        self.jobs[worker_id] = False

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        self.stopped.append(f"{worker_id} at once" if at_once else worker_id)

    async def close(self) -> None:
        self.is_closed = True


def launcher_of(jobs: ListedJobs) -> tuple[JobLauncher, list[CliError]]:
    errors: list[CliError] = []
    return JobLauncher(jobs, SCOPE, errors.append), errors


async def test_jobs_of_an_earlier_run_are_members() -> None:
    jobs = ListedJobs(first=True, second=False)
    launcher, _ = launcher_of(jobs)
    launcher.scale(2)
    assert not launcher.members(), "how many there are is not known"
    assert await launcher.reconcile(0.0) == 2
    launcher.scale(2)
    assert list(launcher.members()) == ["first", "second"] == list(jobs.jobs)
    assert list(launcher.waiting()) == ["second"]


async def test_jobs_start_run_and_are_stopped_once() -> None:
    jobs = ListedJobs()
    launcher, errors = launcher_of(jobs)
    await launcher.reconcile(0.0)
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
    launcher, errors = launcher_of(jobs)
    await launcher.reconcile(0.0)
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
    launcher, errors = launcher_of(jobs)
    await launcher.reconcile(0.0)
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


async def test_close_stops_all_and_waits_for_their_end() -> None:
    class Leaving(ListedJobs):
        async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
            await super().stop(worker_id, at_once=at_once)
            del self.jobs[worker_id]

    jobs = Leaving(first=True, second=False)
    launcher, errors = launcher_of(jobs)
    await launcher.reconcile(0.0)
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
    launcher, errors = launcher_of(jobs)
    await launcher.reconcile(0.0)
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
    launcher, errors = launcher_of(jobs)
    await launcher.reconcile(0.0)
    launcher.scale(1)
    for now in (0.0, 1.0, 2.0):
        await launcher.reconcile(now)
    assert jobs.num_started == 1 and list(launcher.members()) == list(jobs.jobs) and len(errors) == 1


async def test_kill_ends_the_wait_for_jobs() -> None:
    jobs = ListedJobs(first=True)
    launcher, errors = launcher_of(jobs)
    await launcher.reconcile(0.0)
    launcher.kill()
    await launcher.close()
    assert [error.message for error in errors] == ["jobs may still run"] and jobs.is_closed
