"""Traces of real arrivals, scaled to a cluster."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, chain, count, pairwise
from pathlib import Path
from typing import TypeVar

from torchrelay.sim.scenario import Request, ServedModel

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A line of a trace."""

    at: float  # seconds from the first arrival
    num_prompt_tokens: int
    num_output_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """Reads a CSV file with ``COLUMNS``, the format of the Azure LLM inference traces.

    Raises ``ValueError`` that names the missing columns, or the line and the column at fault.
    """
    arrivals: list[Arrival] = []
    begin: datetime | None = None
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (lines.fieldnames or ())]:
            raise ValueError(f"{path} has no column {', '.join(missing)}")
        for row in lines:
            where = f"{path}, line {lines.line_num}"
            at = _value(row, COLUMNS[0], where, "a time such as 2023-11-16 18:17:03.97", _time)
            tokens = [_value(row, column, where, "a whole number of at least 0", _count) for column in COLUMNS[1:]]
            begin = begin or at
            arrivals.append(Arrival((at - begin).total_seconds(), max(tokens[0], 1), max(tokens[1], 1)))
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _value(
    row: Mapping[str, str | None], column: str, where: str, wanted: str, read: Callable[[str], ValueT]
) -> ValueT:
    """Parses a column with ``read``. Raises ``ValueError`` that says ``where`` it is not what is ``wanted``."""
    text = row[column] or ""
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{where}: {column} must be {wanted}, not {text[:40]!r}") from error


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text[:26])


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError("negative")
    return number


def halves(arrivals: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
    """Splits the trace in the middle of its time: a half to tune on and a half to score on."""
    middle = (arrivals[0].at + arrivals[-1].at) / 2
    first = [arrival for arrival in arrivals if arrival.at < middle]
    second = [arrival for arrival in arrivals if arrival.at >= middle]
    return first, [replace(arrival, at=arrival.at - middle) for arrival in second]


def requests_of(
    arrivals: Sequence[Arrival], models: Sequence[ServedModel], copies: float, zipf: float, seed: int
) -> list[Request]:
    """Draws requests as ``request_stream`` does, and shifts those of each model in time, each model by its own seeded
    part of the trace's length: a burst of the trace must not be a burst of all models at the same moment. What is
    shifted beyond the end begins the trace. In order of time and id.
    """
    random_ = random.Random(f"{seed} shifts")
    begin, length_s = (arrivals[0].at, arrivals[-1].at - arrivals[0].at) if arrivals else (0.0, 0.0)
    shifts_s = {model.name: random_.random() * length_s for model in models}
    requests = [
        replace(
            request,
            arrives_at=begin + (request.arrives_at - begin + shifts_s[request.model]) % length_s if length_s else begin,
        )
        for request in request_stream(arrivals, models, copies, zipf, seed)
    ]
    return sorted(requests, key=lambda request: (request.arrives_at, request.request_id))


def request_stream(
    arrivals: Iterable[Arrival], models: Sequence[ServedModel], copies: float, zipf: float, seed: int
) -> Iterator[Request]:
    """Yields each arrival ``copies`` times on average, in order of time. Further copies arrive at random moments before
    the next arrival; models follow a Zipf law over their order.
    """
    random_ = random.Random(seed)
    cumulated = list(accumulate(1 / rank**zipf for rank in range(1, len(models) + 1)))
    for number, (arrival, following) in enumerate(pairwise(chain(arrivals, [None]))):
        assert arrival is not None
        gap_s = following.at - arrival.at if following is not None else 0.0
        num = int(copies) + (random_.random() < copies - int(copies))
        requests = []
        for copy in range(num):
            at = arrival.at + (random_.random() * gap_s if copy else 0.0)
            model = random_.choices(models, cum_weights=cumulated)[0]
            requests.append(
                Request(f"r{number}-{copy}", at, model.name, arrival.num_prompt_tokens, arrival.num_output_tokens)
            )
        yield from sorted(requests, key=lambda request: request.arrives_at)


def repeated(arrivals: Sequence[Arrival], seconds: float) -> Iterator[Arrival]:
    """Repeats the trace for ``seconds``, with its mean gap between repetitions."""
    begin, length_s = arrivals[0].at, arrivals[-1].at - arrivals[0].at
    period_s = length_s * len(arrivals) / max(len(arrivals) - 1, 1)
    for number in count():
        for arrival in arrivals:
            at = arrival.at - begin + number * period_s
            if at >= seconds:
                return
            yield replace(arrival, at=at)
        if not period_s:
            return
