"""Redis: hot state that gateways share and can rebuild. Never a system of record."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff


def connect(url: str) -> Redis:
    """A client whose calls give up within a second: callers go on without hot state rather than wait for it."""
    return Redis.from_url(
        url,
        socket_timeout=1.0,
        socket_connect_timeout=1.0,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
        health_check_interval=15,
    )
