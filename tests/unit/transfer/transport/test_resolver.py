"""Names are looked up within a time limit, once for all who ask."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.wait import HANG_S, wait_until
from torchrelay.transfer.transport.resolver import Resolver
from torchrelay.transfer.transport.tcp import TcpTransport

look_up = socket.getaddrinfo


class SlowServer:
    """The system's resolver with its servers unreachable: it hangs until ``answer`` is set."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.num_asked = 0

    def __call__(self, host: str, port: int, **options: Any) -> Any:
        if options.get("flags"):
            return look_up(host, port, **options)
        self.num_asked += 1
        self.answer.wait(60.0)
        return look_up("127.0.0.1", port, **options)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowServer]:
    server = SlowServer()
    monkeypatch.setattr(socket, "getaddrinfo", server)
    yield server
    server.answer.set()


def soon(s: float = HANG_S) -> float:
    return time.monotonic() + s


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3"])
def test_address_not_looked_up(away: SlowServer, host: str) -> None:
    family, place = Resolver().resolve(host, 7, soon())
    assert place[:2] == (host, 7)
    assert family == (socket.AF_INET6 if ":" in host else socket.AF_INET)
    assert away.num_asked == 0


def test_name_resolves() -> None:
    family, place = Resolver().resolve("localhost", 7, soon())
    assert place[0] == ("::1" if family == socket.AF_INET6 else "127.0.0.1")


def test_unknown_name_raises() -> None:
    with pytest.raises(OSError, match="has no address"):
        Resolver().resolve(f"{'x' * 70}.invalid", 7, soon())


def test_connect_times_out_without_name_servers(away: SlowServer) -> None:
    with pytest.raises(TimeoutError, match="not resolved in time"):
        TcpTransport().connect("some-host:7", 0.3)
    assert not away.answer.is_set()  # the lookup itself still hangs


def test_stop_ends_lookup_wait(away: SlowServer) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(InterruptedError):
        TcpTransport().connect("other-host:7", 60.0, stop)  # the last test's lookup may still be running


def test_concurrent_callers_share_lookup(away: SlowServer) -> None:
    resolver = Resolver()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            resolver.resolve("some-host", 7, soon(0.02))
    assert away.num_asked == 1
    threading.Timer(0.05, away.answer.set).start()
    assert resolver.resolve("some-host", 7, soon())[1] == ("127.0.0.1", 7)
    assert away.num_asked == 1
    wait_until(lambda: not any(thread.name == "resolve" for thread in threading.enumerate()))
    resolver.resolve("some-host", 7, soon())
    assert away.num_asked == 2  # nothing is cached: names move
