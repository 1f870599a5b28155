"""Fixtures for all tests: real brokers, started once and shared; tests keep apart by prefixes of their own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from opentelemetry import metrics
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support.brokers import nats_server, redis_server
from tests.support.cpu_times import CpuTimes
from tests.support.guard import start_guard
from tests.support.programs import Program, fork_programs
from torchrelay.common.process.heap import trim_heap

# A suite started in a shell's background has SIGINT ignored, and so would have the programs that it interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says something about the machine, and nothing about the code.
hypothesis.settings.register_profile(
    "torchrelay",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # which measures wall time
)
hypothesis.settings.load_profile("torchrelay")
# Without a provider, the API keeps all instruments for a later one, and with them whole stores and their arenas.
metrics.set_meter_provider(metrics.NoOpMeterProvider())
# Read when Triton is imported: its kernels run in an interpreter, on any machine. With 0 the same tests use the GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="write a table of where the time went to FILE")


_GUARD = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the processes of xdist belong to the run of the process that starts them
        config.stash[_GUARD] = start_guard()
    fork_programs()
    if hasattr(config, "workerinput"):  # otherwise few tests run, perhaps none that starts a program
        Program.prepare()
    if path := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(Path(path)))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis; use keys of your own."""
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real NATS server with JetStream; use a subject prefix of your own."""
    with nats_server(tmp_path_factory.mktemp("nats")) as url:
        yield url


# Beginnings of the paths of modules that share a platform, the longest first. They go to one process together.
SHARED_PLATFORMS = (
    "tests/hostile/test_",
    "tests/e2e/faults/",
    "tests/console/",
    "tests/clients/",
    "tests/e2e/shared/",
)
# Tests of processes come next: they wait for much of their time, while others compute.
PROCESSES = ("tests/fleet/", "tests/hostile/", "tests/e2e/", "tests/lab/", "tests/integration/", "tests/structure/")
# The modules of other folders that take longest, in seconds of CPU: they begin first, so that none is left alone.
LONG_MODULES: dict[str, float] = {}


class _Schedule(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Shares out whole modules, or whole folders that share a platform, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return next(filter(nodeid.startswith, SHARED_PLATFORMS), nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Schedule:
    return _Schedule(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by module, the longest first; the order within a module stays."""

    def place(item: pytest.Item) -> tuple[float, ...]:
        first = (not item.nodeid.startswith(folder) for folder in (*SHARED_PLATFORMS, *PROCESSES))
        return *first, -LONG_MODULES.get(item.nodeid.partition("::")[0], 0)

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps what the modules hold out of later garbage collections, which then take milliseconds, not a second."""
    gc.disable()
    collected = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    return collected


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Returns a module's memory after its last test: stores and models are in reference cycles."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        trim_heap()
