"""A short load on the platform: requests of given sizes at random times, and their means."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean
from typing import Final

from torchrelay.cli.bench.answered import Answered
from torchrelay.cli.bench.load_client import LoadClient
from torchrelay.cli.bench.run import run_open
from torchrelay.cli.errors import CliError
from torchrelay.modelspec.sizing.operating_point import Workload
from torchrelay.sim.traces import Arrival

_LOAD_S: Final = 10.0
_LEAST, _MOST = 8, 200  # requests


def arrivals(requests_per_s: float) -> list[float]:
    """Times of a Poisson process that begins with a request, for about ``_LOAD_S``."""
    number = min(max(round(requests_per_s * _LOAD_S), _LEAST), _MOST)
    gaps = [random.expovariate(requests_per_s) for _ in range(number - 1)]
    return list(accumulate(gaps, initial=0.0))


def drive(client: LoadClient, work: Workload, times: Sequence[float]) -> list[Answered]:
    """Sends a request at each time, after one that loads the model. Raises ``CliError`` if one fails."""
    asyncio.run(_drive(client, work, times))
    return client.answered


async def _drive(client: LoadClient, work: Workload, times: Sequence[float]) -> None:
    try:
        await client.send(work.num_prompt, work.num_answer)
        _check(client.answered)
        client.begin()
        await run_open(client, [Arrival(at, work.num_prompt, work.num_answer) for at in times])
        _check(client.answered)
    finally:
        await client.close()


def _check(answered: Sequence[Answered]) -> None:
    if error := next((each.error for each in answered if each.error), ""):
        raise CliError(f"a request of the load failed: {error}", "lower --rate")


def figures(answered: Sequence[Answered]) -> dict[str, float]:
    """Means of the requests, and tokens per second from the first request to the last token."""
    begin, end = min(each.sent_s for each in answered), max(each.last_s or 0.0 for each in answered)
    gaps = [each.tpot_s for each in answered if each.num_output_tokens > 1]
    return {
        "tokens_per_s": sum(each.num_output_tokens for each in answered) / (end - begin),
        "ttft_s": mean(each.ttft_s or 0.0 for each in answered),
        "tbt_s": mean(gaps) if gaps else 0.0,
    }
