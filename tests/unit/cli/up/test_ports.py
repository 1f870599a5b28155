"""Ports of installs that run side by side."""

from __future__ import annotations

import socket
import sys
from contextlib import closing

import pytest

from torchrelay.cli.errors import CliError
from torchrelay.cli.up.ports import Ports


def test_a_preferred_port_is_given_once_even_before_anyone_listens() -> None:
    with closing(Ports()) as first, closing(Ports()) as second:
        preferred = first.free()
        first.close()
        assert first.free(preferred=[preferred]) == preferred
        other = second.free(preferred=[preferred])
        assert (other == preferred) == (sys.platform != "linux")


def test_a_taken_port_is_a_problem() -> None:
    with closing(Ports()) as ports, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert ports.free(preferred=[port]) != port
        with pytest.raises(CliError, match=f"port {port} on 127.0.0.1 is taken"):
            ports.exactly("127.0.0.1", port)


def test_an_address_of_another_machine() -> None:
    with closing(Ports()) as ports, pytest.raises(CliError, match="cannot listen on"):
        ports.free("192.0.2.1")
