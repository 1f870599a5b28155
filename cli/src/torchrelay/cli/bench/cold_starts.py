"""Requests that waited for a load, and where their time went, from the platform's explanations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.bench.answered import Answered
from torchrelay.cli.errors import ApiError, Unreachable

MAX_EXPLAINED: Final = 500  # the slowest: cold requests are among them
Phases = Sequence[Mapping[str, Any]]


def explained(client: GatewayClient, answered: Iterable[Answered]) -> list[Phases]:
    """The phases of the requests with the latest first tokens. Left out are old ones, which the platform forgets, and
    all others once it does not answer.
    """
    slowest = sorted((each for each in answered if each.ttft_s is not None), key=lambda each: -(each.ttft_s or 0.0))
    known = []
    for request in slowest[:MAX_EXPLAINED]:
        try:
            known.append(client.call("GET", f"/v1/requests/{quote(request.request_id)}/explain")["phases"])
        except ApiError as error:
            if error.status != 404:
                break
        except Unreachable:
            break
    return known


def is_cold(phases: Phases) -> bool:
    """Whether the request was placed on an instance that was still loading: only its timeline has that load's plan."""
    return any(phase["name"] == "plan" for phase in phases)


def phase_seconds(phases: Phases) -> dict[str, float]:
    """Seconds from the begin to the end of each phase that has ended; on several hosts from the first to the last."""
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for phase in phases:
        name, begin, end = phase["name"], phase["begin_unix_us"], phase["end_unix_us"]
        if end >= begin:
            begins[name], ends[name] = min(begins.get(name, begin), begin), max(ends.get(name, end), end)
    return {name: (ends[name] - begins[name]) / 1e6 for name in begins}
