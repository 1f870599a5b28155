"""The weekly times of a model's greater minimum, as operators write them."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.catalog.schedules import ScheduleEntry, parse_entry

HOUR_S = 3600


def at(text: str) -> float:
    """Unix seconds of a time with its offset."""
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("mon-fri 08:00-18:00 Europe/Berlin = 2", "mon-fri 08:00-18:00 Europe/Berlin = 2"),
        ("  MON,wed,Tue  8:00 - 18:30 utc=3 ", "mon-wed 08:00-18:30 UTC = 3"),
        ("fri-mon 22:00-06:00 america/new_york = 1", "mon,fri-sun 22:00-06:00 America/New_York = 1"),
        ("daily 00:00-24:00 Asia/Kolkata = 10000", "daily 00:00-24:00 Asia/Kolkata = 10000"),
        ("mon-sun 23:00-00:00 UTC = 1", "daily 23:00-00:00 UTC = 1"),
    ],
)
def test_entries_are_parsed(written: str, read: str) -> None:
    assert str(parse_entry(written)) == read
    assert parse_entry(read) == parse_entry(written)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("weekdays at eight", "is not of the form DAYS BEGIN-END ZONE = INSTANCES; write it as 'mon-fri 08:00-18:00"),
        ("mon-fri 08:00-18:00 = 2", "is not of the form"),
        ("mon-fry 08:00-18:00 UTC = 2", "has unknown days 'mon-fry'; write mon, tue,"),
        ("mon 08:00-18:60 UTC = 2", "has no time 18:60; write times from 00:00 to 24:00"),
        ("mon 24:00-06:00 UTC = 2", "begins at 24:00; write 00:00, and the next day"),
        ("mon 08:00-08:00 UTC = 2", "ends when it begins; for whole days write 00:00-24:00"),
        ("mon 08:00-18:00 Europe/Berlln = 2", "has an unknown time zone 'Europe/Berlln'; write an IANA name"),
        ("mon 08:00-18:00 ../../etc/passwd = 2", "has an unknown time zone"),
        ("mon 08:00-18:00 UTC = 0", "the number of instances must be from 1 to 10,000"),
    ],
)
def test_invalid_entries_are_refused_with_a_hint(written: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_entry(written)
    assert refused.value.field == "schedule" and said in refused.value.message
    assert refused.value.message.startswith(f"schedule {written!r} ")


WORKDAYS, NIGHT = "mon-fri 08:00-18:00 Europe/Berlin = 2", "fri 22:00-06:00 UTC = 1"
MONDAY = ("2026-11-30T08:00+01:00", 10.0)


@pytest.mark.parametrize(
    ("entry", "now", "windows"),
    [
        (WORKDAYS, "2026-11-27T17:59:59+01:00", [("2026-11-27T08:00+01:00", 10.0), MONDAY]),  # a Friday
        (WORKDAYS, "2026-11-27T18:00:00+01:00", [MONDAY]),
        # A window over midnight belongs to its first day.
        (NIGHT, "2026-11-28T05:00+00:00", [("2026-11-27T22:00+00:00", 8.0), ("2026-12-04T22:00+00:00", 8.0)]),
        (NIGHT, "2026-11-28T06:00+00:00", [("2026-12-04T22:00+00:00", 8.0)]),
        # Local time goes on through a change of the clock.
        (
            "daily 08:00-18:00 Europe/Berlin = 1",
            "2026-10-24T00:00+02:00",
            [("2026-10-24T08:00+02:00", 10.0), ("2026-10-25T08:00+01:00", 10.0)],
        ),
        # A change within a window prolongs or shortens it: the clock is put back; it shows the window's times twice; it
        # is put forward; there is no 02:30; the window ends in the hour that is left out.
        ("sun 01:00-05:00 Europe/Berlin = 1", "2026-10-25T00:00+02:00", [("2026-10-25T01:00+02:00", 5.0)]),
        ("sun 02:15-02:45 Europe/Berlin = 1", "2026-10-25T00:00+02:00", [("2026-10-25T02:15+02:00", 1.5)]),
        ("sun 01:00-05:00 Europe/Berlin = 1", "2026-03-29T00:00+01:00", [("2026-03-29T01:00+01:00", 3.0)]),
        ("sun 02:30-03:15 Europe/Berlin = 1", "2026-03-29T00:00+01:00", [("2026-03-29T01:30+01:00", 0.75)]),
        ("sat 22:00-02:30 Europe/Berlin = 1", "2026-03-28T12:00+01:00", [("2026-03-28T22:00+01:00", 4.5)]),
    ],
)
def test_windows_from_now_on(entry: str, now: str, windows: list[tuple[str, float]]) -> None:
    assert [
        (each.begin_unix_s, (each.end_unix_s - each.begin_unix_s) / HOUR_S)
        for each in islice(parse_entry(entry).windows(at(now)), len(windows))
    ] == [(at(begin), hours) for begin, hours in windows]


@given(
    entry=st.builds(
        ScheduleEntry,
        st.frozensets(st.integers(0, 6), min_size=1),
        st.integers(0, 1439),
        st.integers(1, 1440),
        st.sampled_from(["Europe/Berlin", "America/New_York", "UTC", "Australia/Lord_Howe", "Pacific/Apia"]),
        st.integers(1, 9),
    ).filter(lambda entry: entry.begin_minute != entry.end_minute),
    now=st.integers(0, 4 * 10**9),
)
def test_windows_are_ordered_and_entries_round_trip(entry: ScheduleEntry, now: int) -> None:
    assert parse_entry(str(entry)) == entry
    windows = list(islice(entry.windows(now), 9))
    assert all(each.end_unix_s > now and each.begin_unix_s < each.end_unix_s for each in windows)
    assert [each.begin_unix_s for each in windows] == sorted({each.begin_unix_s for each in windows})
    assert windows[0].begin_unix_s <= now + 8 * 24 * HOUR_S, "each week has one"
