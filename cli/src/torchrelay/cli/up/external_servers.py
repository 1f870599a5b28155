"""Brokers and ledger that variables name instead of embedded ones; checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from torchrelay.cli.errors import CliError
from torchrelay.cli.up.children.child import is_listening
from torchrelay.gateway.settings import check_database_url

_SECRET = re.compile(r"((?:password|token|secret|key)=)[^&#]*", re.IGNORECASE)  # in a query


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """A server that ``variable`` names by ``url``; ``address`` is None when it cannot be checked."""

    name: str
    variable: str
    url: str
    address: tuple[str, int] | None


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
    found = []
    for variable, (name, schemes, port) in _BROKERS.items():
        if url := environment.get(variable, ""):
            found.append(_server(name, variable, url, schemes, port))
    variable = "TORCHRELAY_DATABASE_URL"
    if url := environment.get(variable, ""):
        try:
            check_database_url(url)
        except ValueError as error:
            message = str(error).replace(repr(url), repr(without_password(url)))
            raise CliError(f"{variable}: {message}", "fix it, or unset it to use the home folder's ledger") from None
        if url.startswith("postgresql"):
            scheme = url.partition(":")[0]
            found.append(_server("PostgreSQL", variable, url, (scheme,), 5432))
    return found


def without_password(url: str) -> str:
    """The URL for display. It may be malformed, so anything before an @ counts as user and password."""
    scheme, slashes, rest = url.rpartition("://")
    user, at, host = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    masked = f"{name}{colon}{'***' if colon else ''}{at}{host}"
    return _SECRET.sub(r"\1***", f"{scheme}{slashes}{masked}")


def _server(name: str, variable: str, url: str, schemes: tuple[str, ...], default_port: int) -> ExternalServer:
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
    return ExternalServer(name, variable, url, None if host is None else (host, port))


async def check_external_servers(environment: Mapping[str, str]) -> None:
    """Raises ``CliError`` within seconds when a server does not answer; services would wait much longer."""
    for server in external_servers(environment):
        if server.address is not None and not await is_listening(*server.address):
            host, port = server.address
            raise CliError(
                f"no {server.name} answers at {host}:{port}, which {server.variable} names",
                f"start it, or unset {server.variable}: then {_FALLBACKS[server.name]}",
            )
