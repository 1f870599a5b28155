"""The lab's network behaves as its tests assume: addresses, rates, counters, silent cuts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.lab import Host, Lab
from tests.support.wait import HANG_S

pytestmark = pytest.mark.lab

_RATE_MBIT = 200
_MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(["control", "h1", "h2"], rate_mbit=_RATE_MBIT) as lab:
        yield lab


@contextmanager
def connection(source: Host, target: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection from ``source`` to ``target``: its end there, its end here."""
    with target.inside():
        listener = socket.create_server((target.address, 0))
    with listener:
        with source.inside():
            sender = socket.create_connection(listener.getsockname(), timeout=HANG_S)
        with sender:
            receiver, _ = listener.accept()
            with receiver:
                receiver.settimeout(HANG_S)
                yield sender, receiver


def transfer_mbit_per_s(source: Host, target: Host, num_bytes: int = 2 * _MEGABYTE) -> float:
    """The rate of a transfer over one TCP connection; a busy machine lowers it, nothing raises it."""
    with connection(source, target) as (sender, receiver):
        begun = time.monotonic()
        sending = threading.Thread(target=sender.sendall, args=(bytes(num_bytes),))
        sending.start()
        received = 0
        while received < num_bytes:
            received += len(receiver.recv(1 << 18))
        took_s = time.monotonic() - begun
        sending.join()
    return num_bytes * 8 / 1e6 / took_s


def test_links_are_held_to_their_rates(lab: Lab) -> None:
    first, second = lab["h1"], lab["h2"]
    assert transfer_mbit_per_s(first, second, 6 * _MEGABYTE) < 1.05 * _RATE_MBIT
    for direction, there, back in (("outgoing_mbit", first, second), ("incoming_mbit", second, first)):
        first.set_rate(**{direction: _RATE_MBIT / 4})
        assert transfer_mbit_per_s(there, back) < 1.1 / 4 * _RATE_MBIT
        first.set_rate(**{direction: _RATE_MBIT})
    with pytest.raises(ValueError, match="cut"):
        first.set_rate(outgoing_mbit=0)


def test_counters_equal_the_bytes_on_the_link(lab: Lab) -> None:
    out, into, idle = lab["h1"].bytes_out(), lab["h2"].bytes_in(), lab["control"].bytes_in()
    transfer_mbit_per_s(lab["h1"], lab["h2"], _MEGABYTE)
    assert 1.0 <= (lab["h1"].bytes_out() - out) / _MEGABYTE < 1.1
    assert 1.0 <= (lab["h2"].bytes_in() - into) / _MEGABYTE < 1.1
    assert lab["control"].bytes_in() - idle < 10_000


def test_cut_link_is_silent_until_restored(lab: Lab) -> None:
    cut = lab["h2"]
    with connection(lab["h1"], cut) as (sender, receiver):
        cut.cut()
        try:
            sender.sendall(b"lost, sent again")
            receiver.settimeout(0.5)
            with pytest.raises(TimeoutError):
                receiver.recv(64)
            with cut.inside(), closing(socket.socket()) as outward:
                outward.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    outward.connect((lab["h1"].address, 9))
            assert sender.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        finally:
            cut.restore()
        receiver.settimeout(HANG_S)
        assert receiver.recv(64) == b"lost, sent again"
