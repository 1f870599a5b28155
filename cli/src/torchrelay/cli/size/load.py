"""A short load on the platform: requests of given sizes at random times, through its public API."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean
from typing import Any, Final

from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import CliError
from torchrelay.modelspec.sizing.operating_point import Workload

_LOAD_S: Final = 10.0
_LEAST, _MOST = 8, 200  # requests
_AT_ONCE: Final = 96  # below the connections of a client
_FIRST_TOKEN: Final = 256  # tokens below it are often special, or single bytes


@dataclass(frozen=True, slots=True)
class Answered:
    """The times of a request, from a common begin."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int


def arrivals(requests_per_s: float) -> list[float]:
    """Times of a Poisson process that begins with a request, for about ``_LOAD_S``."""
    number = min(max(round(requests_per_s * _LOAD_S), _LEAST), _MOST)
    gaps = [random.expovariate(requests_per_s) for _ in range(number - 1)]
    return list(accumulate(gaps, initial=0.0))


def drive(client: GatewayClient, model: str, vocab_size: int, work: Workload, times: Sequence[float]) -> list[Answered]:
    """Sends a request at each time, after one that loads the model. Raises ``CliError``."""
    low = min(_FIRST_TOKEN, vocab_size // 2)
    bodies = [
        {
            "model": model,
            "prompt": [random.randrange(low, vocab_size) for _ in range(work.num_prompt)],
            "max_tokens": work.num_answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        for _ in range(len(times) + 1)
    ]
    _answered(client, bodies.pop(), 0.0, 0.0)
    begin = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        running = [threads.submit(_answered, client, body, begin, due) for body, due in zip(bodies, times, strict=True)]
        return [each.result() for each in running]


def figures(answered: list[Answered]) -> dict[str, float]:
    """Means of the requests, and tokens per second from the first request to the last token."""
    begin, end = min(each.sent_s for each in answered), max(each.last_s for each in answered)
    gaps = [(each.last_s - each.first_s) / (each.num_tokens - 1) for each in answered if each.num_tokens > 1]
    return {
        "tokens_per_s": sum(each.num_tokens for each in answered) / (end - begin),
        "ttft_s": mean(each.first_s - each.sent_s for each in answered),
        "tbt_s": mean(gaps) if gaps else 0.0,
    }


def _answered(client: GatewayClient, body: dict[str, Any], begin: float, due_s: float) -> Answered:
    time.sleep(max(due_s - (time.perf_counter() - begin), 0.0) if begin else 0.0)
    sent_s = time.perf_counter() - begin
    first_s = last_s = 0.0
    num_tokens = 0
    with client.stream("POST", "/v1/completions", json=body) as lines:
        for event in _events(lines):
            if number := sum(len(choice.get("token_ids") or ()) for choice in event["choices"]):
                last_s = time.perf_counter() - begin
                first_s = first_s or last_s
                num_tokens += number
    if not num_tokens:
        raise CliError("an answer of the load has no tokens", "see: torchrelay events")
    return Answered(sent_s, first_s, last_s, num_tokens)


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix(b"data: ").strip()
        if data == line.strip() or data == b"[DONE]":  # a comment, an empty line, or the end
            continue
        event = json.loads(data)
        if "error" in event:
            raise CliError(f"a request of the load failed: {event['error']['message']}", "lower --rate")
        yield event
