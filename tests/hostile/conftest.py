"""One platform for all attacks, with a neighbour whose chats must go on, and a tenant who attacks with a key."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.hostile.neighbour import Neighbour, neighbour_process
from tests.support.platform import Platform, running_platform

MODEL = Path(__file__).resolve().parents[2] / "examples" / "glossary" / "model"
OPTIONS = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1", "--idle-timeout-s", "3600")
# Shorter than the defaults, so that what is closed for its silence is closed within a test.
SILENCE_S = 2
LIMITS = {
    "TORCHRELAY_HEAD_TIMEOUT_S": "2",
    "TORCHRELAY_BODY_SILENCE_S": "3",
    "TORCHRELAY_IDLE_CONNECTION_S": "5",
    "TORCHRELAY_ANSWER_SILENCE_S": str(SILENCE_S),
}
MB = 10**6
MAX_GROWTH_BYTES = 100 * MB  # of the gateway during an attack
MAX_LEFT_BYTES = 20 * MB  # of it, a while after
REST_S = 30.0
MAX_RATIO = 2.0  # of the neighbour's P99 under the attacks of one file to its P99 just before each
NUM_PEACE_FAMILY, NUM_PEACE_CASE, NUM_ATTACK_CASE = 50, 3, 3  # chats, at least
MAX_CASE_RATIO = 10.0  # of its slowest chat in a single one: too few for a P99
ATTACKER_NICE = 10  # its CPU is no part of the platform's


@dataclass(frozen=True, slots=True)
class Family:
    """The neighbour's chats just before and during the attacks of one file: all together enough for a P99."""

    peace_s: list[float] = field(default_factory=list)
    attack_s: list[float] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)  # chat, by case

    @property
    def ratio(self) -> float:
        return p99(self.attack_s) / p99(self.peace_s)


FAMILIES: dict[str, Family] = {}


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("platform"), OPTIONS, LIMITS) as running:
        yield running


@pytest.fixture(scope="session")
def victim(platform: Platform) -> str:
    """The key of the neighbour, whose model is ``neighbour/glossary``."""
    key = platform.tenant("neighbour")
    platform.upload(key, MODEL, "glossary")
    return key


@pytest.fixture(scope="session")
def neighbour(rest: Address, victim: str) -> Iterator[Neighbour]:
    with neighbour_process(rest.port, victim, "neighbour/glossary") as running:
        yield running


@pytest.fixture(scope="session")
def mallory(platform: Platform) -> str:
    """The key of a tenant that attacks."""
    return platform.tenant("mallory")


@pytest.fixture(scope="session")
def glossary(platform: Platform, mallory: str) -> str:
    """The attacker's model; its parameters are the neighbour's, so both share an instance."""
    return platform.upload(mallory, MODEL, "glossary")


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


@pytest.fixture(scope="session")
def rest(platform: Platform) -> Address:
    parts = urlsplit(platform.http)
    assert parts.hostname and parts.port
    return Address(parts.hostname, parts.port)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, neighbour: Neighbour) -> Iterator[Family]:
    made = FAMILIES[request.node.name] = Family(peace_s=neighbour.chats_s(NUM_PEACE_FAMILY))
    yield made
    assert made.ratio <= MAX_RATIO, f"P99 {p99(made.attack_s):.3f} s under attack, {p99(made.peace_s):.3f} s in peace"


@dataclass(frozen=True, slots=True)
class Watch:
    """The gateway during one attack."""

    gateway: int
    before_bytes: int


def memory_bytes(pid: int, field: str = "VmRSS") -> int:
    """Resident memory; ``VmHWM``: the most since ``reset_peak``."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@contextmanager
def nice(value: int) -> Iterator[None]:
    """Of this thread, and those that it starts."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(before, value))
    try:
        yield
    finally:
        with suppress(PermissionError):  # not root: the tests that follow give way as well
            os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture
def watch(request: pytest.FixtureRequest, platform: Platform, neighbour: Neighbour, family: Family) -> Iterator[Watch]:
    """The test's attack: the neighbour's chats go on meanwhile, and the gateway's memory is bounded and comes back."""
    gateway = platform.pid("gateway")
    reset_peak(gateway)
    watching = Watch(gateway, memory_bytes(gateway))
    family.peace_s.extend(neighbour.chats_s(NUM_PEACE_CASE))
    neighbour.begin(at_least=NUM_ATTACK_CASE)
    try:
        with nice(ATTACKER_NICE):
            yield watching
    finally:
        chats_s = neighbour.end()
    family.attack_s.extend(chats_s)
    family.slowest_s[request.node.name] = max(chats_s)
    case_ratio = max(chats_s) / p99(family.peace_s)
    assert case_ratio <= MAX_CASE_RATIO, f"a chat took {case_ratio:.1f} times the P99 in peace: {max(chats_s):.2f} s"
    growth = memory_bytes(gateway, "VmHWM") - watching.before_bytes
    deadline = time.monotonic() + REST_S
    assert platform.pid("gateway") == gateway, "the gateway was replaced"
    assert growth < MAX_GROWTH_BYTES, f"the gateway grew by {growth / MB:.0f} MB"
    while (left := memory_bytes(gateway) - watching.before_bytes) > MAX_LEFT_BYTES:
        assert time.monotonic() < deadline, f"{left / MB:.0f} MB are still there"
        time.sleep(0.2)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, family in FAMILIES.items():
        if not family.attack_s:
            continue
        terminalreporter.write_line(
            f"{name}: the neighbour's P99 {p99(family.attack_s):.3f} s in {len(family.attack_s)} chats under attack, "
            f"{p99(family.peace_s):.3f} s in {len(family.peace_s)} in peace: {family.ratio:.2f} times"
        )
        slowest = sorted(family.slowest_s.items(), key=lambda one: -one[1])[:5]
        terminalreporter.write_line("    slowest: " + ", ".join(f"{case} {took_s:.2f} s" for case, took_s in slowest))
