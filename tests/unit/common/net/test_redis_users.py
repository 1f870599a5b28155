"""Redis serves the gateways, who know the password, and lets them administer nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from tests.support.brokers import redis_server
from torchrelay.common.net import redis_client
from torchrelay.common.net.redis_users import redis_users
from torchrelay.common.net.urls import with_credentials


@pytest.fixture(scope="module")
def guarded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis"), redis_users("gateway", "pw")) as url:
        yield url


@pytest.mark.parametrize(
    "credentials", [None, ("gateway", "wrong"), ("default", ""), ("default", "pw"), ("root", "pw")]
)
async def test_redis_without_password_is_refused(guarded_url: str, credentials: tuple[str, str] | None) -> None:
    url = with_credentials(guarded_url, *credentials) if credentials else guarded_url
    redis: Any
    async with Redis.from_url(url) as redis:
        for command in ("PING", "GET key"):
            with pytest.raises(AuthenticationError):
                await redis.execute_command(*command.split())


async def test_redis_allows_commands_of_limits(guarded_url: str) -> None:
    redis = redis_client.connect(with_credentials(guarded_url, "gateway", "pw"))
    try:
        script = redis.register_script("redis.call('SET', KEYS[1], ARGV[1]); return redis.call('TIME')")
        assert await script(keys=["key"], args=["value"])
        assert await redis.get("key") == b"value"
    finally:
        await redis.aclose()


@pytest.mark.parametrize(
    "command", ["CONFIG GET requirepass", "FLUSHALL", "KEYS *", "ACL LIST", "SHUTDOWN", "REPLICAOF a 1"]
)
async def test_redis_refuses_administration(guarded_url: str, command: str) -> None:
    redis: Any  # its published types lack the arguments
    async with Redis.from_url(with_credentials(guarded_url, "gateway", "pw")) as redis:
        with pytest.raises(NoPermissionError):
            await redis.execute_command(*command.split())
