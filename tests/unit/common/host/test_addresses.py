"""Addresses of IPv4 and IPv6, as text and as listening sockets."""

from __future__ import annotations

import socket

import pytest

from torchrelay.common.host.addresses import client_network, join_address, listening_socket, plain_host, split_address


@pytest.mark.parametrize(
    ("host", "joined", "plain"),
    [
        ("127.0.0.1", "127.0.0.1:80", "127.0.0.1"),
        ("::1", "[::1]:80", "::1"),
        ("[::1]", "[::1]:80", "::1"),
        ("gateway", "gateway:80", "gateway"),
    ],
)
def test_address_is_joined_and_split(host: str, joined: str, plain: str) -> None:
    assert join_address(host, 80) == joined
    assert split_address(joined) == (plain, 80)
    assert plain_host(host) == plain


@pytest.mark.parametrize("wrong", ["", "80", "host:", "host:http", "host:²"])
def test_address_without_port_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="not a valid address of the form host:port"):
        split_address(wrong)


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("[::1]", ["::1"]),
        ("::", ["::1", "127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
    ],
)
def test_socket_listens_on_both_families_where_asked(host: str, reached_at: list[str]) -> None:
    with listening_socket(host, 0) as listening:
        port = listening.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as client:
                assert (client.connect_ex((address, port)) == 0) is (address in reached_at)


def test_clients_of_one_ipv6_network_count_together() -> None:
    assert client_network("192.0.2.7") == client_network("::ffff:192.0.2.7") == "192.0.2.7"
    assert client_network("2001:db8:1:2:3::4") == client_network("2001:db8:1:2::5") == "2001:db8:1:2::"
    assert client_network("2001:db8:1:3::4") != "2001:db8:1:2::"
    assert client_network("fe80::1%eth0") == "fe80::"
    assert client_network("") == ""
