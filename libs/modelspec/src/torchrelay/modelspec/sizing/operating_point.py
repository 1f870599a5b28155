"""The latencies and rates of requests whose steps take known times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchrelay.modelspec.sizing.roofline import Steps


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind, and the targets of their latencies."""

    requests_per_s: float
    num_prompt: int
    num_answer: int
    ttft_s: float
    tbt_s: float

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_answer


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A device that always decodes ``num_choices``: as one ends, the next prompt is prefilled beside the others."""

    num_choices: float
    ttft_s: float
    tbt_s: float
    requests_per_s: float
    tokens_per_s: float  # of answers


def operating_point(steps: Steps, work: Workload, num_choices: int) -> OperatingPoint | None:
    """The means with ``num_choices`` at once; None if the prompts that they need do not fit into the steps, or no time
    is known of so many.
    """
    chunk = steps.token_budget - num_choices
    per_step = num_choices / work.num_answer  # prompts that must be prefilled in a step
    if num_choices > steps.max_choices or per_step * work.num_prompt > chunk:
        return None
    context, prompt_attended = work.num_prompt + work.num_answer / 2, work.num_prompt**2 / 2
    num_chunks = math.ceil(work.num_prompt / chunk)
    share = min(num_chunks * per_step, 1.0)  # of the steps, those that prefill
    prompts = per_step / share  # or the part of one, that such a step prefills
    plain_s = steps.step_s(num_choices, context)
    mixed_s = steps.step_s(num_choices, context, prompts * work.num_prompt, prompts * prompt_attended)
    tbt_s = (1 - share) * plain_s + share * mixed_s
    rate = per_step / tbt_s
    # A request waits for the rest of the running step, for prompts that came by chance shortly before it (M/D/1, with
    # the time of a prompt's part of a full step as the service), and for its own steps.
    rest_s = ((1 - share) * plain_s**2 + share * mixed_s**2) / (2 * tbt_s)
    part = work.num_prompt / chunk
    service_s = part * steps.step_s(num_choices, context, chunk, prompt_attended / part)
    utilization = rate * service_s
    if utilization >= 1:
        return None
    wait_s = utilization * service_s / (2 * (1 - utilization))
    return OperatingPoint(num_choices, rest_s + wait_s + num_chunks * mixed_s, tbt_s, rate, num_choices / tbt_s)


def best_point(steps: Steps, work: Workload, kv_tokens: float) -> OperatingPoint | None:
    """The most requests per second within the targets and ``kv_tokens``; None if not even a single one is."""
    best, low, high = None, 1, int(min(kv_tokens / work.num_tokens, steps.max_choices))
    while low <= high:  # latencies grow with the batch
        middle = (low + high) // 2
        point = operating_point(steps, work, middle)
        if point is not None and point.ttft_s <= work.ttft_s and point.tbt_s <= work.tbt_s:
            best, low = point, middle + 1
        else:
            high = middle - 1
    return best


def point_at_rate(steps: Steps, work: Workload, requests_per_s: float) -> OperatingPoint | None:
    """The smallest batch that keeps up with a rate; None if none does."""
    least, low, high = None, 1, steps.max_choices
    while low <= high:
        middle = (low + high) // 2
        point = operating_point(steps, work, middle)
        if point is None or point.requests_per_s >= requests_per_s:
            least, high = point or least, middle - 1
        else:
            low = middle + 1
    return least


def latency_curve(steps: Steps, work: Workload, kv_tokens: float) -> Iterator[OperatingPoint]:
    """Points of growing batches, as many as KV and the steps hold."""
    size = 1
    while size <= min(kv_tokens / work.num_tokens, steps.max_choices):
        point = operating_point(steps, work, size)
        if point is None:
            return
        yield point
        size = max(size + 1, math.ceil(size * 1.25))
