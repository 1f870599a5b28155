"""Retries for as long as a service that `torchrelay up` restarts may take to come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import stamina
from stamina.instrumentation import set_on_retry_hooks

RESTART_TIMEOUT_S = 6.0  # a restarted service answers within this time

set_on_retry_hooks([])  # by default stamina would log every retry to the terminal


def restart_attempts(
    error: type[Exception], may_return: Callable[[], bool], wait_s: float, timeout_s: float
) -> Iterable[stamina.Attempt]:
    """Attempts until one does not raise ``error``; raises the last one after ``timeout_s``, or if nothing restarts."""
    return stamina.retry_context(
        on=lambda raised: isinstance(raised, error) and may_return(),
        attempts=None,
        timeout=timeout_s,
        wait_initial=wait_s,
        wait_max=wait_s,
        wait_jitter=0,
    )
