"""Runs Lua scripts on Redis and gives no answer when it is unreachable or silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from torchrelay.common.net import redis_client
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.limits.circuit import Circuit

log = get_logger(__name__)
ANSWER_LIMIT_S = 0.05  # in all, whatever the client retries: a request waits for it
SKIP_S = 1.0


class RedisScriptRunner:
    """Owns the connection to Redis. After one failure no request asks Redis for ``skip_s``."""

    def __init__(
        self,
        url: str,
        answer_limit_s: float = ANSWER_LIMIT_S,
        skip_s: float = SKIP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis_client.connect(url)
        self._answer_limit_s = answer_limit_s
        self._circuit = Circuit(skip_s)
        self._clock = clock

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | int | float]) -> list[bytes] | None:
        """The script's answer; None while Redis does not answer, which is logged once. It may have run all the same."""
        if not self._circuit.may_ask(self._clock()):
            return None
        # In a task of its own, which is not waited for: the client may take seconds to end a call that is cancelled.
        asking = asyncio.ensure_future(self._redis.register_script(script)(keys=keys, args=args))
        try:
            await asyncio.wait({asking}, timeout=self._answer_limit_s)
            if not asking.done():
                raise TimeoutError
            answer: list[bytes] = asking.result()
        except (RedisError, OSError) as error:
            if self._circuit.is_closed:
                log.warning("redis_away_each_gateway_limits_its_share", error=repr(error)[:200])
            self._circuit.silent(self._clock())
            return None
        finally:
            if not asking.done():
                asking.cancel()
                asking.add_done_callback(_ignore)
        if not self._circuit.is_closed:
            log.info("redis_back")
        self._circuit.answered()
        return answer

    async def close(self) -> None:
        await self._redis.aclose()


def _ignore(asked: asyncio.Future[list[bytes]]) -> None:
    """Takes the error of a call that nobody waits for, which would be logged otherwise."""
    if not asked.cancelled():
        asked.exception()
