"""Calls to a platform's token path, as plain as a client makes them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.http import http
from tests.support.platform import Platform
from tests.support.wait import HANG_S


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def complete(platform: Platform, key: str, model: str, prompt: list[Any] | str, **options: Any) -> dict[str, Any]:
    """A greedy completion with token ids; asserts that it succeeds."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "return_token_ids": True, **options}
    response = http.post(f"{platform.http}/v1/completions", json=body, headers=headers(key), timeout=HANG_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@dataclass(slots=True)
class Streamed:
    """The delivered part of a streamed completion."""

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_events_with_token: int = 0
    finish_reason: str = ""
    usage: dict[str, Any] | None = None
    done: bool = False
    error: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        self.request_id = event["id"]
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            tokens = choice.get("token_ids") or []
            self.token_ids += tokens
            self.num_events_with_token += bool(tokens)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def stream(
    platform: Platform, key: str, model: str, prompt: list[int] | str, timeout_s: float = HANG_S, **options: Any
) -> Iterator[Streamed]:
    """A streamed greedy completion: yields its state after every event; the same object each time."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "return_token_ids": True, "stream": True}
    state = Streamed()
    url = f"{platform.http}/v1/completions"
    usage = {"stream_options": {"include_usage": True}}
    with http.stream(
        "POST", url, json={**body, **usage, **options}, headers=headers(key), timeout=timeout_s
    ) as response:
        assert response.status_code == 200, response.read()
        for line in _lines(response):
            if line == "data: [DONE]":
                state.done = True
            elif line.startswith("data: "):
                state.take(json.loads(line[6:]))
            else:
                continue
            yield state


def _lines(response: httpx.Response) -> Iterator[str]:
    """``iter_lines`` also splits where the text of a token is one of Unicode's line ends."""
    rest = b""
    for received in response.iter_bytes():
        *lines, rest = (rest + received).split(b"\n")
        yield from (line.decode() for line in lines)


@dataclass(frozen=True, slots=True)
class ToldWait:
    """A comment on a stream about the load of its model, with its time since the request was sent."""

    at_s: float
    num_layers_ready: int
    num_layers: int
    left_s: float


def wake(platform: Platform, key: str, model: str, prompt: list[int]) -> tuple[list[ToldWait], float]:
    """Streams a completion of a model that no instance serves. Returns what its comments told while the model loaded,
    and the seconds until its first token.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "stream": True}
    told: list[ToldWait] = []
    begin = time.monotonic()
    url = f"{platform.http}/v1/completions"
    with http.stream("POST", url, json=body, headers=headers(key), timeout=HANG_S) as response:
        for line in response.iter_lines():
            at_s = time.monotonic() - begin
            if line.startswith("data: {"):
                return told, at_s
            if match := re.fullmatch(
                rf": loading {re.escape(model)}(?:, (\d+) of (\d+) layers)?, about (.+) s left", line
            ):
                ready, number, left_s = match.groups(default="0")
                told.append(ToldWait(at_s, int(ready), int(number), float(left_s)))
    raise AssertionError(f"no token came: status {response.status_code}")
