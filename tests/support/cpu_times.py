"""A table of where a run of the tests spends its time: ``pytest --cpu-times=FILE``.

The CPU time of a phase of a test is that of the pytest process and of all its descendants, so the platform that a test
starts counts, and the platform that several tests share counts in the test that runs meanwhile. Waiting is the time
that passes while neither computes.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_FILES = 60


@dataclass(slots=True)
class Times:
    """Seconds of some tests: passed, computed by pytest's own process, and computed by its descendants."""

    num_tests: int = 0
    wall_s: float = 0.0
    own_cpu_s: float = 0.0
    child_cpu_s: float = 0.0

    @property
    def cpu_s(self) -> float:
        return self.own_cpu_s + self.child_cpu_s

    @property
    def waiting_s(self) -> float:
        return max(0.0, self.wall_s - self.cpu_s)

    def add(self, report: Report) -> None:
        self.num_tests += report.when == "call"
        self.wall_s += report.duration
        self.own_cpu_s += report.own_cpu_s
        self.child_cpu_s += report.child_cpu_s


class Report(Protocol):
    """A report of pytest's with the CPU time of its phase."""

    when: str
    duration: float
    own_cpu_s: float
    child_cpu_s: float


@dataclass(slots=True, eq=False)
class CpuTimes:
    """The plugin: test processes stamp their reports, and the controlling process sums them up and writes the table."""

    path: Path
    _files: defaultdict[str, Times] = field(default_factory=lambda: defaultdict(Times))
    _began_s: float = field(default_factory=time.monotonic)
    _own_s: float = 0.0
    _child_s: float = 0.0
    _collection_s: float = 0.0

    def pytest_collection_finish(self) -> None:
        self._collection_s = self._own_s = time.process_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Report, Report]:
        report = yield
        own_s, child_s = time.process_time(), descendants_cpu_s()
        # The time of a killed process is lost, unless its parent waited for it: the sum may decrease.
        report.own_cpu_s, report.child_cpu_s = own_s - self._own_s, max(0.0, child_s - self._child_s)
        self._own_s, self._child_s = own_s, child_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "context"):  # a subtest's time is part of its test's
            self._files[report.nodeid.partition("::")[0]].add(cast(Report, report))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._collection_s += getattr(node, "workeroutput", {}).get("collection_s", 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            cast(Any, session.config).workeroutput["collection_s"] = self._collection_s

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if not hasattr(config, "workerinput"):
            self.path.write_text(self._table())

    def _table(self) -> str:
        total, folders = Times(), defaultdict[str, Times](Times)
        for name, times in self._files.items():
            for group in (total, folders[_folder(name)]):
                group.num_tests += times.num_tests
                group.wall_s += times.wall_s
                group.own_cpu_s += times.own_cpu_s
                group.child_cpu_s += times.child_cpu_s
        longest = sorted(self._files.items(), key=lambda item: -item[1].wall_s)[:_NUM_FILES]
        head = (
            "| {} | tests | passed, s | computed by pytest, s | computed by its processes, s | waited, s |\n|---|"
            + "---:|" * 5
        )
        passed_s = time.monotonic() - self._began_s
        rows = [
            f"The run took {passed_s:.0f} s. Collecting the tests took {self._collection_s:.0f} s of CPU.\n",
            head.format("folder"),
        ]
        rows += [_row(name, times) for name, times in (*sorted(folders.items()), ("all", total))]
        rows += ["", head.format("file"), *(_row(name, times) for name, times in longest)]
        return "\n".join(rows) + "\n"


def _folder(name: str) -> str:
    """The folder that a file counts in: ``tests/e2e``, ``tests/unit/engine``."""
    return "/".join(Path(name).parts[: 3 if name.startswith("tests/unit/") else 2])


def _row(name: str, times: Times) -> str:
    values = (times.wall_s, times.own_cpu_s, times.child_cpu_s, times.waiting_s)
    return f"| {name} | {times.num_tests} | " + " | ".join(f"{value:.1f}" for value in values) + " |"


def descendants_cpu_s() -> float:
    """The CPU time of all descendants of this process, of ended ones as far as their parents waited for them."""
    ended = os.times()
    return ended.children_user + ended.children_system + sum(_tree_cpu_s(pid) for pid in _children(os.getpid()))


def _tree_cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
        return own_s + sum(_tree_cpu_s(child) for child in _children(pid))
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def _children(pid: int) -> list[int]:
    """Children of any thread of a process."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return children
