"""Redis: shared state of gateways that can be rebuilt. Never a system of record."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff


def connect(url: str) -> Redis:
    """A client whose calls fail within a second: callers continue without Redis rather than wait."""
    return Redis.from_url(
        url,
        socket_timeout=1.0,
        socket_connect_timeout=1.0,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
        health_check_interval=15,
    )
