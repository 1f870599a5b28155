"""Runs Lua scripts on Redis and carries on without it when it is unreachable."""

from __future__ import annotations

from collections.abc import Sequence

from redis.exceptions import RedisError

from torchrelay.common.net import redis_client
from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)


class RedisScriptRunner:
    """Owns the connection to Redis."""

    def __init__(self, url: str) -> None:
        self._redis = redis_client.connect(url)
        self._is_away = False

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | int | float]) -> list[bytes]:
        """The script's answer; ``[ok]`` if Redis is unreachable, which is logged once."""
        try:
            answer: list[bytes] = await self._redis.register_script(script)(keys=keys, args=args)
        except (RedisError, OSError) as error:
            if not self._is_away:
                log.warning("redis_away_requests_not_limited", error=str(error)[:200])
            self._is_away = True
            return [b"ok"]
        if self._is_away:
            log.info("redis_back")
            self._is_away = False
        return answer

    async def close(self) -> None:
        await self._redis.aclose()
