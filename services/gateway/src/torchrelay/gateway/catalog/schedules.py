"""Weekly times at which a model has a greater minimum of instances, as an operator writes them. Pure.

``mon-fri 08:00-18:00 Europe/Berlin = 2``: days, half-open local times, an IANA time zone, instances per role.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from torchrelay.common.errors import InvalidRequest

MAX_ENTRIES = 32  # of one model
MAX_INSTANCES = 10_000
EXAMPLE = "mon-fri 08:00-18:00 Europe/Berlin = 2"
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_ENTRY = re.compile(r"(\S+)\s+(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)\s+(\S+)\s*=\s*(\d{1,9})")
_DAY_MINUTES = 24 * 60
_MAX_QUOTED = 60


@dataclass(frozen=True, slots=True)
class Window:
    """A period in Unix seconds, half-open."""

    begin_unix_s: int
    end_unix_s: int


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """``days``: the days on which it begins, Monday is 0. Minutes count from midnight; an end that is not after the
    begin is on the next day.
    """

    days: frozenset[int]
    begin_minute: int
    end_minute: int
    time_zone: str
    num_instances: int  # per role

    def __str__(self) -> str:
        times = f"{_clock(self.begin_minute)}-{_clock(self.end_minute)}"
        return f"{_named(self.days)} {times} {self.time_zone} = {self.num_instances}"

    def windows(self, now_unix_s: float) -> Iterator[Window]:
        """The windows that end after now, in order.

        If the clocks change within a window, it is the longer of both readings. Raises ``ZoneInfoNotFoundError`` if
        this machine does not know the time zone.
        """
        zone = ZoneInfo(self.time_zone)
        # Two days back: a window that began there may end on the next day, and a clock change may prolong it.
        day = datetime.fromtimestamp(now_unix_s, zone).date() - timedelta(days=2)
        num_days = int(self.end_minute <= self.begin_minute)
        while True:
            if day.weekday() in self.days:
                begin = min(_instants(day, self.begin_minute, zone))
                end = max(_instants(day + timedelta(days=num_days), self.end_minute, zone))
                if end > now_unix_s:
                    yield Window(begin, end)
            day += timedelta(days=1)


def parse_entry(text: str) -> ScheduleEntry:
    """The entry of a text. Raises ``InvalidRequest``, which says what to write instead."""
    parts = _ENTRY.fullmatch(text.strip())
    if parts is None:
        raise _refused(text, "is not of the form DAYS BEGIN-END ZONE = INSTANCES", f"write it as {EXAMPLE!r}")
    days, begin_hour, begin_min, end_hour, end_min, zone, number = parts.groups()
    begin, end = _minute(text, begin_hour, begin_min), _minute(text, end_hour, end_min)
    if begin == _DAY_MINUTES:
        raise _refused(text, "begins at 24:00", "write 00:00, and the next day")
    if begin == end:
        raise _refused(text, "ends when it begins", "for whole days write 00:00-24:00")
    if not 1 <= int(number) <= MAX_INSTANCES:
        why = f"the number of instances must be from 1 to {MAX_INSTANCES:,}"
        raise _refused(text, "is out of range", f"{why}; it raises min_instances and never lowers it")
    return ScheduleEntry(_days(text, days), begin, end, _zone(text, zone), int(number))


def _instants(day: date, minute: int, zone: ZoneInfo) -> tuple[int, int]:
    """The instants at which the zone's clock shows that time: they differ only around a clock change."""
    local = datetime.combine(day, datetime.min.time()) + timedelta(minutes=minute)
    first, second = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC).timestamp() for fold in (0, 1))
    return int(first), int(second)


def _minute(text: str, hour: str, minute: str) -> int:
    minutes = int(hour) * 60 + int(minute)
    if int(minute) > 59 or minutes > _DAY_MINUTES:
        raise _refused(text, f"has no time {hour}:{minute}", "write times from 00:00 to 24:00")
    return minutes


def _days(text: str, given: str) -> frozenset[int]:
    if given.lower() == "daily":
        return frozenset(range(7))
    numbers: set[int] = set()
    for part in given.lower().split(","):
        first, is_range, last = part.partition("-")
        if first not in _DAYS or (is_range and last not in _DAYS):
            hint = f"write {', '.join(_DAYS)}, joined as mon-fri or sat,sun, or daily"
            raise _refused(text, f"has unknown days {given[:_MAX_QUOTED]!r}", hint)
        begin = _DAYS.index(first)
        num_days = (_DAYS.index(last) - begin) % 7 if is_range else 0
        numbers.update((begin + number) % 7 for number in range(num_days + 1))
    return frozenset(numbers)


def _zone(text: str, given: str) -> str:
    if (zone := _zones().get(given.lower())) is None:
        hint = "write an IANA name such as Europe/Berlin, America/New_York or UTC"
        raise _refused(text, f"has an unknown time zone {given[:_MAX_QUOTED]!r}", hint)
    return zone


@cache
def _zones() -> dict[str, str]:
    """The names of the time zones that this machine knows, by their names in lower case."""
    return {name.lower(): name for name in available_timezones()}


def _named(days: frozenset[int]) -> str:
    """``daily``, ``mon-fri``, ``mon,wed``, ``sat-sun``."""
    if len(days) == 7:
        return "daily"
    runs: list[list[int]] = []
    for day in sorted(days):
        if runs and runs[-1][-1] == day - 1:
            runs[-1].append(day)
        else:
            runs.append([day])
    return ",".join(_DAYS[run[0]] + (f"-{_DAYS[run[-1]]}" if len(run) > 1 else "") for run in runs)


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def _refused(text: str, why: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"schedule {text[:_MAX_QUOTED]!r} {why}; {hint}", field="schedule")
