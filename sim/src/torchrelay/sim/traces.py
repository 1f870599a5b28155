"""Real arrivals, brought to the size of a cluster."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, chain, count, pairwise
from pathlib import Path

from torchrelay.sim.scenario import Request, ServedModel


@dataclass(frozen=True, slots=True)
class Arrival:
    """One line of a trace."""

    at: float  # seconds from its first
    num_prompt_tokens: int
    num_output_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """A CSV file with TIMESTAMP, ContextTokens and GeneratedTokens, as the Azure LLM inference traces have them.

    Raises ``ValueError`` that names the line at fault.
    """
    arrivals: list[Arrival] = []
    begin: datetime | None = None
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected TIMESTAMP, ContextTokens, GeneratedTokens: {error}"
                ) from error
            begin = begin or at
            arrivals.append(Arrival((at - begin).total_seconds(), max(tokens[0], 1), max(tokens[1], 1)))
    return sorted(arrivals, key=lambda arrival: arrival.at)


def halves(arrivals: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
    """By time: one to tune on, one to score on."""
    middle = (arrivals[0].at + arrivals[-1].at) / 2
    first = [arrival for arrival in arrivals if arrival.at < middle]
    second = [arrival for arrival in arrivals if arrival.at >= middle]
    return first, [Arrival(each.at - middle, each.num_prompt_tokens, each.num_output_tokens) for each in second]


def requests_of(
    arrivals: Sequence[Arrival], models: Sequence[ServedModel], copies: float, zipf: float, seed: int
) -> list[Request]:
    """All of ``request_stream``, in order of time and id."""
    found = request_stream(arrivals, models, copies, zipf, seed)
    return sorted(found, key=lambda request: (request.arrives_at, request.request_id))


def request_stream(
    arrivals: Iterable[Arrival], models: Sequence[ServedModel], copies: float, zipf: float, seed: int
) -> Iterator[Request]:
    """Each arrival ``copies`` times on average, each copy at a random moment of the gap to the next arrival; models by
    a Zipf law over their order. In order of time.
    """
    random_ = random.Random(seed)
    cumulated = list(accumulate(1 / rank**zipf for rank in range(1, len(models) + 1)))
    for number, (arrival, following) in enumerate(pairwise(chain(arrivals, [None]))):
        assert arrival is not None
        gap_s = following.at - arrival.at if following is not None else 0.0
        num = int(copies) + (random_.random() < copies - int(copies))
        found = []
        for copy in range(num):
            at = arrival.at + (random_.random() * gap_s if copy else 0.0)
            model = random_.choices(models, cum_weights=cumulated)[0]
            found.append(
                Request(f"r{number}-{copy}", at, model.name, arrival.num_prompt_tokens, arrival.num_output_tokens)
            )
        yield from sorted(found, key=lambda request: request.arrives_at)


def repeated(arrivals: Sequence[Arrival], seconds: float) -> Iterator[Arrival]:
    """The trace again and again, with its mean gap between, for so long."""
    begin, length_s = arrivals[0].at, arrivals[-1].at - arrivals[0].at
    period_s = length_s * len(arrivals) / max(len(arrivals) - 1, 1)
    for number in count():
        for one in arrivals:
            at = one.at - begin + number * period_s
            if at >= seconds:
                return
            yield replace(one, at=at)
        if not period_s:
            return
