"""Repeated questions to the gateway, for commands that show what changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.restarts import restart_attempts
from torchrelay.cli.errors import ApiError, Unreachable

if TYPE_CHECKING:
    from torchrelay.control.v1.scheduler_pb2 import ClusterView

T = TypeVar("T")
ABSENT_S = 30.0  # a gateway that starts again on a busy machine takes 7 s
_TIMEOUT_S = 15.0  # longer than the gateway waits for the scheduler


def look(client: GatewayClient, path: str, accept: str = "application/json", **query: Any) -> bytes:
    """Returns the answer of the gateway about the platform. Raises ``Unreachable`` also for a gateway that does not
    reach the scheduler.
    """
    try:
        return client.content("GET", path, params=query, headers={"accept": accept}, timeout=_TIMEOUT_S)
    except ApiError as error:
        if error.status != 503:
            raise
        hint = "is nats-server running?" if "NATS" in error.message else "is the platform up? torchrelay up"
        raise Unreachable(error.message, hint) from error


def cluster_view(client: GatewayClient) -> ClusterView:
    """The scheduler's view of the cluster now. Raises as ``look`` does."""
    from torchrelay.control.v1.scheduler_pb2 import ClusterView

    return ClusterView.FromString(look(client, "/v1/cluster", "application/x-protobuf"))


def looks(
    ask: Callable[[], T],
    may_return: Callable[[], bool],
    on_lost: Callable[[], None],
    every_s: float = 1.0,
    timeout_s: float = ABSENT_S,
    is_behind: Callable[[T], bool] = lambda _: False,
) -> Iterator[T]:
    """An answer every ``every_s``. After a question without one, calls ``on_lost()`` and asks again for ``timeout_s``.

    ``may_return``: whether waiting is of use. ``is_behind``: whether the next question follows an answer at once.
    Raises ``Unreachable``, at once if the first question has no answer.
    """
    answer = ask()
    while True:
        yield answer
        if not is_behind(answer):
            time.sleep(every_s)
        try:
            answer = ask()
        except Unreachable:
            on_lost()
            answer = _asked_again(ask, may_return, every_s, timeout_s)


def _asked_again(ask: Callable[[], T], may_return: Callable[[], bool], every_s: float, timeout_s: float) -> T:
    try:
        for attempt in restart_attempts(Unreachable, may_return, every_s, timeout_s):
            with attempt:
                return ask()
    except Unreachable as error:
        if may_return():
            raise
        raise Unreachable("the platform has stopped", "start it again: torchrelay up") from error
    raise AssertionError("a retry ends with a result or an error")
