"""Hosts and ports, of IPv4 and IPv6: as text, and as listening sockets."""

from __future__ import annotations

import socket

REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # for all addresses of a machine: the address for itself


def plain_host(host: str) -> str:
    """The host without the brackets that URLs put around IPv6 addresses."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_address(host: str, port: int) -> str:
    """``host:port``, or ``[host]:port`` for IPv6."""
    return f"[{plain_host(host)}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port. Raises ``ValueError``."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ValueError(f"{address!r} is not a valid address of the form host:port")
    return plain_host(host), int(port)


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listening_socket(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A socket that listens; on ``::`` for IPv4 too. Raises ``OSError``."""
    host = plain_host(host)
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family_of(host), backlog=backlog, dualstack_ipv6=is_dual)
