"""Redis: shared state of gateways that can be rebuilt. Never a system of record."""

from __future__ import annotations

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

MAX_CONNECTIONS = 8


def connect(url: str) -> Redis:
    """A client whose calls fail within a second: callers continue without Redis rather than wait.

    It has few connections, which take turns: a crowd of callers at the start would wait for connections of their own.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=1.0,
        socket_timeout=1.0,
        socket_connect_timeout=1.0,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
        health_check_interval=15,
    )
    return Redis.from_pool(pool)
