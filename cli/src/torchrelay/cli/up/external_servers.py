"""Brokers and ledger that variables name instead of embedded ones; checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from urllib.parse import urlsplit

from torchrelay.cli.errors import CliError
from torchrelay.cli.up.children.child import is_listening
from torchrelay.common.net.urls import without_password
from torchrelay.gateway.settings import check_database_url


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """A server that ``variable`` names: one of ``addresses`` must answer; there are none if it cannot be checked."""

    name: str
    variable: str
    addresses: tuple[tuple[str, int], ...]


_FALLBACKS = {
    "Redis": "a local one is started",
    "NATS": "a local one is started",
    "PostgreSQL": "SQLite keeps the ledger",
}
_BROKERS = {
    "TORCHRELAY_REDIS_URL": ("Redis", ("redis", "rediss", "unix"), 6379),
    "TORCHRELAY_NATS_URL": ("NATS", ("nats", "tls", "ws", "wss"), 4222),
}


def external_servers(environment: Mapping[str, str]) -> list[ExternalServer]:
    """The servers that the variables name. Raises ``CliError`` for an invalid address."""
    servers = []
    for variable, (name, schemes, port) in _BROKERS.items():
        if url := environment.get(variable, ""):
            seeds = url.split(",") if name == "NATS" else [url]
            addresses = (_addresses(name, variable, seed.strip(), schemes, port) for seed in seeds)
            servers.append(ExternalServer(name, variable, tuple(chain.from_iterable(addresses))))
    variable = "TORCHRELAY_DATABASE_URL"
    if url := environment.get(variable, ""):
        try:
            check_database_url(url)
        except ValueError as error:
            raise CliError(f"{variable}: {error}", "fix it, or unset it to use the home folder's ledger") from None
        if url.startswith("postgresql"):
            scheme = url.partition(":")[0]
            servers.append(
                ExternalServer("PostgreSQL", variable, _addresses("PostgreSQL", variable, url, (scheme,), 5432))
            )
    return servers


def _addresses(
    name: str, variable: str, url: str, schemes: tuple[str, ...], default_port: int
) -> tuple[tuple[str, int], ...]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or default_port
    except ValueError as error:
        message = f"{variable} is {without_password(url)!r}: {error}"
        raise CliError(message, f"write it as {schemes[0]}://host:{default_port}") from error
    if parts.scheme not in schemes or (host is None and name == "NATS"):
        message = f"{variable} is {without_password(url)!r}, which is not a valid address"
        raise CliError(message, f"write it as {schemes[0]}://host:{default_port}")
    # Without a host it is a socket file (Redis), or named in the query (PostgreSQL).
    return () if host is None else ((host, port),)


async def check_external_servers(environment: Mapping[str, str]) -> None:
    """Raises ``CliError`` within seconds when a server does not answer; services would wait much longer."""
    for server in external_servers(environment):
        if server.addresses and not await _is_any_listening(server.addresses):
            shown = " or ".join(f"{host}:{port}" for host, port in server.addresses)
            raise CliError(
                f"no {server.name} answers at {shown}, which {server.variable} names",
                f"start it, or unset {server.variable}: then {_FALLBACKS[server.name]}",
            )


async def _is_any_listening(addresses: tuple[tuple[str, int], ...]) -> bool:
    for address in addresses:
        if await is_listening(*address):
            return True
    return False
