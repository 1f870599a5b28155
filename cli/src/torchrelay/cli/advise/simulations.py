"""Simulations of several workloads, in processes of their own if they take long, with progress."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import rich.progress

from torchrelay.cli.views import console
from torchrelay.sim.advice.advice import Result, simulate
from torchrelay.sim.advice.changes import Change
from torchrelay.sim.advice.workload import Workload

_NUM_PROCESSES = 2
_WORTH_PROCESSES_S = 1.0  # of CPU time for each simulation: to start the processes takes 2 s


@dataclass(frozen=True)
class Simulations:
    executor: Executor | None
    progress: rich.progress.Progress

    def base(self, workload: Workload) -> Result:
        """The settings as they are."""
        (result,) = self._results("settings as they are", [workload])
        return result

    def changed(self, changes: Sequence[Change]) -> list[tuple[Change, Result]]:
        results = self._results("changes", [change.workload for change in changes])
        return list(zip(changes, results, strict=True))

    def _results(self, title: str, workloads: Sequence[Workload]) -> Iterable[Result]:
        run = map if self.executor is None else self.executor.map
        return self.progress.track(run(simulate, workloads), len(workloads), description=f"simulating the {title}")


@contextmanager
def simulations_of(workload: Workload) -> Iterator[Simulations]:
    """``workload``: as long as those to be simulated."""
    is_short = workload.simulation_s < _WORTH_PROCESSES_S
    spawn = multiprocessing.get_context("spawn")  # nothing of the terminal's progress is in the processes
    columns = "{task.description}", rich.progress.BarColumn(), rich.progress.MofNCompleteColumn()
    with (
        nullcontext() if is_short else ProcessPoolExecutor(_NUM_PROCESSES, mp_context=spawn) as executor,
        rich.progress.Progress(*columns, console=console.err(), transient=True) as progress,
    ):
        yield Simulations(executor, progress)
