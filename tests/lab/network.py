"""A lab: hosts as network namespaces, joined by a switch in a namespace of its own."""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tests.lab.host import DEVICE, Host
from tests.lab.iproute import LabError, batch, ip, require_machine
from tests.lab.reaper import Reaper

_BRIDGE = "bridge0"
_NETWORK = "10.77.0"
_MAX_HOSTS = 253
_HOST_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class Lab:
    """Hosts with a real TCP stack and a shaped link each, within a `with` block.

    ``rate_mbit`` is each direction of each host's link in Mbit/s; None leaves links unshaped. All devices and addresses
    are in the lab's own namespaces, named by process id and a random part, so labs are isolated from one another, from
    the machine's network and from remains of a crashed lab. Entering raises LabError where the machine cannot run it.
    """

    def __init__(self, hosts: Sequence[str], rate_mbit: float | None = None) -> None:
        _check_names(hosts)
        self.name = f"torchrelay-{os.getpid()}-{secrets.token_hex(3)}"
        self._rate_mbit = math.inf if rate_mbit is None else rate_mbit
        self._switch = f"{self.name}.switch"
        self._hosts = {name: self._host(index, name) for index, name in enumerate(hosts, start=1)}
        self._closing = ExitStack()

    def _host(self, index: int, name: str) -> Host:
        return Host(name, f"{_NETWORK}.{index}", f"{self.name}-{name}", self._switch, f"port{index}")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces of the switch and of the hosts, by their `ip netns` names."""
        return self._switch, *(host.namespace for host in self)

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __enter__(self) -> Self:
        require_machine()
        reaper = Reaper(self.namespaces)
        with ExitStack() as closing:
            closing.callback(self._close, reaper)
            self._build()
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.close()

    def _build(self) -> None:
        for namespace in self.namespaces:
            ip("netns", "add", namespace)
        batch("ip", self._switch, self._switch_setup())
        batch("bridge", self._switch, [f"fdb add {_mac(host)} dev {host.port} master static" for host in self])
        for host in self:
            batch("ip", host.namespace, self._host_setup(host))
            host.set_rate(outgoing_mbit=self._rate_mbit, incoming_mbit=self._rate_mbit)

    # The switch and the hosts are told where everyone is: nothing is flooded into links of hosts that it does not
    # concern, and a cut link is silent (an ARP request without an answer would soon become "no route to host").

    def _switch_setup(self) -> Iterator[str]:
        yield f"link add name {_BRIDGE} type bridge stp_state 0 mcast_snooping 0"
        yield f"link set dev {_BRIDGE} addrgenmode none up"
        for host in self:
            yield f"link add name {host.port} type veth peer name {DEVICE} address {_mac(host)} netns {host.namespace}"
            yield f"link set dev {host.port} addrgenmode none master {_BRIDGE} up"
            yield f"link set dev {host.port} type bridge_slave learning off flood off mcast_flood off bcast_flood off"

    def _host_setup(self, host: Host) -> Iterator[str]:
        yield "link set dev lo up"
        yield f"link set dev {DEVICE} addrgenmode none up"
        yield f"address add {host.address}/24 dev {DEVICE}"
        for other in self:
            if other is not host:
                yield f"neighbour add {other.address} lladdr {_mac(other)} dev {DEVICE} nud permanent"

    def _close(self, reaper: Reaper) -> None:
        for host in self:
            host.kill_all()
        try:
            complaint = reaper.close()
        finally:
            for host in self:
                host.reap()
        if complaint:
            raise LabError(f"{self.name} could not be taken down: {complaint}")


def _mac(host: Host) -> str:
    """A locally administered MAC address that ends like the host's IP address."""
    return "02:77:00:00:00:{:02x}".format(int(host.address.rpartition(".")[2]))


def _check_names(hosts: Sequence[str]) -> None:
    if not 1 <= len(hosts) <= _MAX_HOSTS or len(set(hosts)) != len(hosts):
        raise ValueError(f"a lab has 1 to {_MAX_HOSTS} hosts of different names, not {list(hosts)}")
    if wrong := [name for name in hosts if not _HOST_NAME.fullmatch(name)]:
        raise ValueError(f"hosts' names match {_HOST_NAME.pattern}, unlike {wrong}")
