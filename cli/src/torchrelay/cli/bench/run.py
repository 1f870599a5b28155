"""A load from its first request to its last answer, by its scenario."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from torchrelay.cli.bench.load_client import LoadClient
from torchrelay.cli.bench.workload import Scenario, Workload

if TYPE_CHECKING:
    from torchrelay.sim.traces import Arrival

_AFTER_FAILURE_S: Final = 0.5


async def run_open(client: LoadClient, arrivals: Sequence[Arrival]) -> None:
    """Sends each request when it is due, however many others run."""
    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            await client.sleep_until(arrival.at)
            group.create_task(client.send(arrival.num_prompt_tokens, arrival.num_output_tokens, arrival.at))


async def run_closed(client: LoadClient, load: Workload) -> None:
    """Sends one or several requests, and the next when all of them have ended."""
    at_once = load.at_once if load.scenario == Scenario.MULTI else 1
    while number := min(at_once, _num_left(client, load)):
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(_send(client, load))


async def run_cold(client: LoadClient, load: Workload, zero: Callable[[], Awaitable[None]]) -> None:
    """Sends a request at a random time after each time that the model is at zero, for which it awaits ``zero``."""
    random_ = random.Random(load.seed)
    while _num_left(client, load):
        await zero()
        await asyncio.sleep(random_.uniform(0, load.wait_s))
        await _send(client, load)


async def _send(client: LoadClient, load: Workload) -> None:
    """Sends a request, and waits after a failure: the next might fail at once, too."""
    answered = await client.send(load.num_prompt, load.num_answer)
    if answered.error:
        await asyncio.sleep(_AFTER_FAILURE_S)


def _num_left(client: LoadClient, load: Workload) -> int:
    """Requests that may still begin; only its sign counts for a load without their number."""
    if load.seconds is not None and client.now_s >= load.seconds:
        return 0
    return load.at_once if load.num_requests is None else load.num_requests - len(client.answered)
