"""Events as lines."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from torchrelay.cli.views.event_lines import EventLines, event_text, json_line, parse_duration
from torchrelay.control.v1.scheduler_pb2 import Event

NOW = datetime(2026, 11, 21, 12, 30)


def an_event(kind: str, reason: str = "", at: datetime = NOW, **fields: Any) -> Event:
    at_unix_us = int(at.timestamp() * 1e6) + 123_000
    model: str = fields.pop("model", "acme/tiny")
    return Event(
        sequence=7, at_unix_us=at_unix_us, kind=kind, model=model, reason=reason, fields_json=json.dumps(fields)
    )


def test_lines_stand_below_each_other() -> None:
    lines = EventLines()
    shown = [
        lines.line(event, NOW).plain
        for event in (
            an_event("relay.started", "store-a -> store-b"),
            an_event("relay.finished", "done", model="acme/a-longer-name"),
            an_event("copy.failed", "no space"),
        )
    ]
    assert shown[0] == "12:30:00.123  relay.started      acme/tiny     store-a -> store-b"
    assert shown[1] == "12:30:00.123  relay.finished     acme/a-longer-name  done"
    assert shown[2] == "12:30:00.123  copy.failed        acme/tiny           no space"  # the column has grown


def test_text_that_does_not_fit_follows_between_words() -> None:
    lines = EventLines()
    event = an_event("relay.started", "remote -> store-local, urgent, 3.62 MB: at zero, 1 waiting request")
    first, *rest = lines.line(event, NOW, 80).plain.splitlines()
    assert first == "12:30:00.123  relay.started      acme/tiny"
    assert rest == ["    remote -> store-local, urgent, 3.62 MB: at zero, 1 waiting request"]
    narrow = lines.line(event, NOW, 40).plain.splitlines()[1:]
    assert narrow == ["    remote -> store-local, urgent, 3.62", "    MB: at zero, 1 waiting request"]
    assert len(lines.line(event, NOW, 120).plain.splitlines()) == 1
    event.model = "acme/a-model-with-a-name-that-fills-the-width-of-a-screen-8b"
    assert all(len(line) <= 80 for line in lines.line(event, NOW, 80).plain.splitlines())


def test_event_of_other_day_has_date_and_safe_text() -> None:
    event = an_event("relay.failed", "it was \x1b[2Jdropped\nor so", at=NOW - timedelta(days=1), model="a\x07b")
    shown = EventLines().line(event, NOW).plain
    assert shown.startswith("2026-11-20 12:30:00.123  relay.failed       ab ")
    assert shown.endswith("it was [2Jdropped or so")


def test_event_names_worker_missing_from_reason() -> None:
    about: dict[str, Any] = {"worker_id": "worker-h1", "roles": "prefill,decode", "in_state_s": 4.5678}
    assert event_text(an_event("instance.ready", "all 4 layers loaded in 4.57 s", **about)) == (
        "worker-h1 (prefill,decode): all 4 layers loaded in 4.57 s"
    )
    stopped = an_event("instance.stopped", "its worker was told to stop", **about)
    assert event_text(stopped) == "worker-h1 (prefill,decode) after 4.57 s: its worker was told to stop"
    assert event_text(an_event("scale.down", "idle for 2 s", **about)) == "worker-h1: idle for 2 s"
    assert event_text(an_event("scale.set_roles", "short", **about | {"roles": "decode"})).startswith(
        "worker-h1 (decode)"
    )
    assert event_text(an_event("scale.up", "1 waiting", num_instances=2)) == "1 waiting"
    assert event_text(an_event("relay.started", "a -> b", store_id="b")) == "a -> b"
    published = an_event("model.published", version_id="0123456789abcdef", pack_bytes=31_830_016)
    assert event_text(published) == "version 0123456789ab, 31.8 MB"
    assert event_text(an_event("model.deleted")) == ""


def test_json_line_holds_all_fields() -> None:
    line = json_line(an_event("relay.finished", "done\nwell", cause="idle", took_s=1.5, brought={"store-a": 3}))
    assert "\n" not in line
    at_unix_us = int(NOW.timestamp() * 1e6) + 123_000
    known = {"sequence": 7, "at_unix_us": at_unix_us, "kind": "relay.finished", "model": "acme/tiny"}
    assert json.loads(line) == known | {"cause": "idle", "took_s": 1.5, "brought": {"store-a": 3}, "text": "done well"}
    assert json.loads(json_line(Event(sequence=1)))["kind"] == ""


def test_since_parses_durations() -> None:
    assert [parse_duration(text).total_seconds() for text in ("30s", "10m", "2h", "7d")] == [30, 600, 7200, 604_800]
    for wrong in ("", "10", "m", "-1s", "1.5h", "ten minutes"):
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(wrong)
