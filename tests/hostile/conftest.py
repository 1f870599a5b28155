"""One platform for all attacks, with a neighbour whose chats must go on, and a tenant who attacks with a key."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.completions import headers
from tests.support.platform import Platform, running_platform

MODEL = Path(__file__).resolve().parents[2] / "examples" / "glossary" / "model"
OPTIONS = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1", "--idle-timeout-s", "3600")
# Shorter than the defaults, so that what is closed for its silence is closed within a test.
LIMITS = {"TORCHRELAY_HEAD_TIMEOUT_S": "3", "TORCHRELAY_BODY_SILENCE_S": "4", "TORCHRELAY_IDLE_CONNECTION_S": "15"}
MB = 10**6
MAX_GROWTH_BYTES = 100 * MB  # of the gateway during an attack
MAX_LEFT_BYTES = 60 * MB  # of it, a while after: what the first use of a door costs for good
NOISE_S = 5.0  # a machine that runs other things, too, delays a chat by this much now and then
REST_S = 30.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A tenant that has nothing to do with the attack."""

    platform: Platform
    key: str
    model: str
    answer: str  # to its one question
    p99_s: float  # of its chats, in peace

    def chat(self) -> float:
        """Asks the question over a new connection; returns the seconds to the right answer."""
        begin = time.monotonic()
        told = ask(self.platform, self.key, self.model)
        assert told == self.answer
        return time.monotonic() - begin


def ask(platform: Platform, key: str, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is a relay?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    reply = httpx.post(f"{platform.http}/v1/chat/completions", json=body, headers=headers(key), timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("platform"), OPTIONS, LIMITS) as running:
        yield running


@pytest.fixture(scope="session")
def neighbour(platform: Platform) -> Neighbour:
    key = platform.tenant("neighbour")
    model = platform.upload(key, MODEL, "glossary")
    answer = ask(platform, key, model)
    asked = Neighbour(platform, key, model, answer, 0.0)
    return Neighbour(platform, key, model, answer, p99([asked.chat() for _ in range(20)]))


@pytest.fixture(scope="session")
def mallory(platform: Platform) -> str:
    """The key of a tenant that attacks."""
    return platform.tenant("mallory")


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


@pytest.fixture(scope="session")
def rest(platform: Platform) -> Address:
    parts = urlsplit(platform.http)
    assert parts.hostname and parts.port
    return Address(parts.hostname, parts.port)


class Watch:
    """The neighbour's chats and the gateway's memory, from another thread, for as long as an attack lasts."""

    def __init__(self, neighbour: Neighbour) -> None:
        self._neighbour = neighbour
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.chats_s: list[float] = []
        self.errors: list[BaseException] = []
        self.gateway = neighbour.platform.pid("gateway")
        self.before_bytes = self.peak_bytes = gateway_bytes(self.gateway)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set() or len(self.chats_s) < 3:
                self.chats_s.append(self._neighbour.chat())
                self.peak_bytes = max(self.peak_bytes, gateway_bytes(self.gateway))
        except Exception as error:  # reported by the test
            self.errors.append(error)


def gateway_bytes(pid: int) -> int:
    """Resident memory."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


@pytest.fixture
def watch(neighbour: Neighbour) -> Iterator[Watch]:
    """The test's attack: the neighbour's chats go on meanwhile, and the gateway's memory is bounded and comes back."""
    with unharmed(neighbour) as watching:
        yield watching


@contextmanager
def unharmed(neighbour: Neighbour) -> Iterator[Watch]:
    watching = Watch(neighbour)
    watching.start()
    try:
        yield watching
    finally:
        watching.stop()
    if watching.errors:
        raise AssertionError("a chat of the neighbour failed") from watching.errors[0]
    limit_s = 2 * neighbour.p99_s + NOISE_S
    assert p99(watching.chats_s) <= limit_s, f"{watching.chats_s} against {neighbour.p99_s} in peace"
    assert neighbour.platform.pid("gateway") == watching.gateway, "the gateway was replaced"
    growth = watching.peak_bytes - watching.before_bytes
    assert growth < MAX_GROWTH_BYTES, f"the gateway grew by {growth / MB:.0f} MB"
    deadline = time.monotonic() + REST_S
    while (left := gateway_bytes(watching.gateway) - watching.before_bytes) > MAX_LEFT_BYTES:
        assert time.monotonic() < deadline, f"{left / MB:.0f} MB are still there"
        time.sleep(0.2)
