"""Servers that variables name are tried before anything starts."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.brokers import free_port
from torchrelay.cli.errors import CliError
from torchrelay.cli.up.external_servers import check_external_servers, external_servers

NATS, REDIS, DATABASE = (f"TORCHRELAY_{name}_URL" for name in ("NATS", "REDIS", "DATABASE"))


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        (NATS, "localhost:4222"),
        (NATS, "nats:///"),
        (NATS, "nats://host:many"),
        (REDIS, "http://host"),
        (DATABASE, "foo"),
        (DATABASE, "mysql://host/name"),
    ],
)
def test_invalid_address_is_named(variable: str, url: str) -> None:
    with pytest.raises(CliError) as caught:
        external_servers({variable: url})
    assert variable in caught.value.message and url in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("variable", "url", "told"),
    [
        (NATS, "http://ann:hunter2@host", "'http://ann:***@host'"),
        (NATS, "nats://:hunter2@host:many", "'nats://:***@host:many'"),
        (REDIS, "redis//:hunter2@host", "***@host"),
        (REDIS, "http://host/0?password=hunter2&db=1", "'http://host/0?password=***&db=1'"),
        (DATABASE, "mysql://ann:hunt@er2@host/name", "'mysql://ann:***@host/name'"),
    ],
)
def test_password_is_not_shown(variable: str, url: str, told: str) -> None:
    with pytest.raises(CliError) as caught:
        external_servers({variable: url})
    assert told in caught.value.message
    assert "er2" not in caught.value.message + str(caught.value.__cause__)


def test_certificates_are_found_by_home() -> None:
    named = {
        NATS: "nats://a:b@one, nats://three:5",
        REDIS: "unix:///tmp/redis.sock",
        DATABASE: "postgresql+asyncpg://u:p@two:1/name",
    }
    assert {server.name: server.addresses for server in external_servers(named)} == {
        "Redis": (),
        "NATS": (("one", 4222), ("three", 5)),
        "PostgreSQL": (("two", 1),),
    }
    assert external_servers({DATABASE: "sqlite:///ledger.db", NATS: ""}) == []


async def test_unreachable_external_server_refuses_start() -> None:
    there = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with there:
        port = there.sockets[0].getsockname()[1]
        await check_external_servers({NATS: f"nats://127.0.0.1:{port}"})
        await check_external_servers({NATS: f"nats://127.0.0.1:{free_port()},nats://127.0.0.1:{port}"})  # one of them
    silent = free_port()
    for variable, url in ((NATS, f"nats://127.0.0.1:{silent}"), (REDIS, f"redis://127.0.0.1:{silent}/0")):
        with pytest.raises(CliError, match=f"127.0.0.1:{silent}, which {variable} names"):
            await check_external_servers({variable: url})
