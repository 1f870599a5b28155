"""A platform for all attacks, with a neighbour whose chats must go on, and a tenant who attacks with a key."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.hostile.neighbour import Neighbour, neighbour_process
from tests.support.ingress import running_ingress
from tests.support.platform import Platform, running_platform
from tests.support.wait import HANG_S, wait_until

MODEL = Path(__file__).resolve().parents[2] / "examples" / "glossary" / "model"
OPTIONS = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1", "--idle-timeout-s", "3600")
# Shorter than the defaults, so that what is closed for its silence is closed within a test.
SILENCE_S = 2
LIMITS = {"TORCHRELAY_MESSAGE_TIMEOUT_S": "3", "TORCHRELAY_ANSWER_SILENCE_S": str(SILENCE_S)}
INGRESS_LIMITS = {"timeout http-request": 2, "timeout client": 3, "timeout http-keep-alive": 5}
CONNECTIONS_PER_ADDRESS = 100  # that the ingress accepts of an attacker in a second
MB = 10**6
MAX_GROWTH_BYTES = 100 * MB  # of the gateway during an attack
MAX_LEFT_BYTES = 20 * MB  # of it, a while after
# bench/neighbour.py names a file here: then enough chats for a P99 are timed, before the attacks and during each.
RECORD = os.environ.get("TORCHRELAY_NEIGHBOUR_RECORD")
NUM_PEACE_CHATS, NUM_ATTACK_CHATS = (200, 3) if RECORD else (1, 1)
CHAT_PAUSE_S = 0.0 if RECORD else 0.5  # the CPU of endless chats is the suite's
# The attacker's CPU is no part of the platform's. On a busy machine a niced attacker is itself too slow for the limits.
ATTACKER_NICE = 10 if RECORD else 0


@dataclass(frozen=True, slots=True)
class Chats:
    """Seconds of the neighbour's chats before and during the attacks of one file."""

    peace_s: list[float]
    attack_s: dict[str, list[float]] = field(default_factory=dict)  # by case


RECORDED: dict[str, Chats] = {}


@pytest.fixture(scope="package")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """The platform behind its ingress, which is the only way to it for all tests."""
    folder = tmp_path_factory.mktemp("platform")
    with (
        running_platform(folder, OPTIONS, LIMITS) as behind,
        running_ingress(behind.endpoints, tmp_path_factory.mktemp("ingress"), INGRESS_LIMITS) as port,
    ):
        public = {"http": f"http://127.0.0.1:{port}", "grpc": f"127.0.0.1:{port}"}
        yield replace(behind, endpoints={**behind.endpoints, **public})


@pytest.fixture(scope="package")
def victim(platform: Platform) -> str:
    """The key of the neighbour, whose model is ``neighbour/glossary``."""
    key = platform.tenant("neighbour")
    platform.upload(key, MODEL, "glossary")
    return key


@pytest.fixture(scope="package")
def neighbour(rest: Address, victim: str) -> Iterator[Neighbour]:
    with neighbour_process(rest.port, victim, "neighbour/glossary", CHAT_PAUSE_S) as running:
        yield running


@pytest.fixture(scope="package")
def mallory(platform: Platform) -> str:
    """The key of a tenant that attacks."""
    return platform.tenant("mallory")


@pytest.fixture(scope="package")
def glossary(platform: Platform, mallory: str) -> str:
    """The attacker's model; its parameters are the neighbour's, so both share an instance."""
    return platform.upload(mallory, MODEL, "glossary")


@dataclass(frozen=True, slots=True)
class Address:
    """The ingress, as attackers reach it: from addresses of loopback other than the neighbour's."""

    host: str
    port: int

    def connect(self, number: int = 0, receive_bytes: int = 0) -> socket.socket:
        """A connection of the attacker with this number. ``receive_bytes``: its receive buffer; 0: the default."""
        sock = socket.socket()
        try:
            if receive_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            sock.settimeout(HANG_S)
            sock.bind((f"127.0.{1 + number // 250}.{1 + number % 250}", 0))
            sock.connect((self.host, self.port))
        except BaseException:
            sock.close()
            raise
        return sock


@pytest.fixture(scope="package")
def rest(platform: Platform) -> Address:
    parts = urlsplit(platform.http)
    assert parts.hostname and parts.port
    return Address(parts.hostname, parts.port)


@pytest.fixture(scope="module")
def chats(request: pytest.FixtureRequest, neighbour: Neighbour) -> Chats:
    """The chats of this file's attacks; those in peace are over."""
    return RECORDED.setdefault(request.node.name, Chats(neighbour.chats_s(NUM_PEACE_CHATS)))


def memory_bytes(pid: int, field: str = "VmRSS") -> int:
    """Resident memory; ``VmHWM``: the most since ``reset_peak``."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@contextmanager
def nice(value: int) -> Iterator[None]:
    """Lowers the priority of this thread and of the threads that it starts."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(before, value))
    try:
        yield
    finally:
        with suppress(PermissionError):  # not root: the tests that follow give way as well
            os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture
def watch(request: pytest.FixtureRequest, platform: Platform, neighbour: Neighbour, chats: Chats) -> Iterator[None]:
    """The test's attack: the neighbour's chats go on meanwhile, and the gateway's memory is bounded and comes back."""
    gateway = platform.pid("gateway")
    reset_peak(gateway)
    before_bytes = memory_bytes(gateway)
    neighbour.begin(at_least=NUM_ATTACK_CHATS)
    try:
        with nice(ATTACKER_NICE):
            yield
    finally:
        chats.attack_s[request.node.name] = neighbour.end()
    growth = memory_bytes(gateway, "VmHWM") - before_bytes
    assert platform.pid("gateway") == gateway, "the gateway was replaced"
    assert growth < MAX_GROWTH_BYTES, f"the gateway grew by {growth / MB:.0f} MB"
    wait_until(lambda: memory_bytes(gateway) - before_bytes <= MAX_LEFT_BYTES, "the release of the gateway's memory")


def pytest_sessionfinish() -> None:
    if RECORD:
        rows = {name: {"peace_s": each.peace_s, "attack_s": each.attack_s} for name, each in RECORDED.items()}
        Path(RECORD).write_text(json.dumps(rows))
