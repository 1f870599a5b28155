"""Text on a terminal: events as lines, answers between words, and characters that its encoding lacks."""

from __future__ import annotations

import io
import json
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.cli.views import console
from torchrelay.cli.views.event_lines import EventLines, event_text, json_line, parse_duration
from torchrelay.cli.views.word_wrap import WordWrap

NOW = datetime(2026, 11, 21, 12, 30)


def an_event(kind: str, reason: str = "", at: datetime = NOW, **fields: Any) -> dict[str, Any]:
    at_unix_us = int(at.timestamp() * 1e6) + 123_000
    known = {"sequence": 7, "at_unix_us": at_unix_us, "kind": kind, "model": "acme/tiny", "reason": reason}
    return known | fields


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
    event["model"] = "acme/a-model-with-a-name-that-fills-the-width-of-a-screen-8b"
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


def test_since_parses_durations() -> None:
    assert [parse_duration(text).total_seconds() for text in ("30s", "10m", "2h", "7d")] == [30, 600, 7200, 604_800]
    for wrong in ("", "10", "m", "-1s", "1.5h", "ten minutes"):
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(wrong)


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join([wrap.feed(piece) for piece in pieces]) + wrap.rest()


def test_lines_end_between_words() -> None:
    assert wrapped(["A re", "lay brings the wei", "ghts  to many"], 12) == "A relay\nbrings the\nweights  to\nmany"
    assert wrapped(["one\n  two three\n\nfour "], 11) == "one\n  two three\n\nfour "
    assert wrapped(["an", " incomprehensibility is"], 8) == "an\nincomprehensibility is"
    assert wrapped(["日本語 日本"], 9) == "日本語\n日本"  # two cells a letter


def test_character_is_shown_when_complete() -> None:
    wrap = WordWrap(80)
    assert [wrap.feed(piece) for piece in ("Hel", "lo", " wor", "ld\n")] == ["", "", "Hello", " world\n"]


@given(st.lists(st.text("ab \n", max_size=9), max_size=9), st.integers(1, 12))
def test_wrapping_keeps_words_and_width(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    shown = wrapped(pieces, width)
    assert shown.split() == text.split()
    if all(len(word) <= width for word in text.split()):
        assert all(len(line.rstrip()) <= width or line[0] == " " for line in shown.splitlines())


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", ("acme/mod?le.", "####.. | > * ?", "gr??e")),
        ("latin-1", ("acme/modèle.", "####.. | > * ?", "größe")),
        ("utf-8", ("acme/modèle…", "████░░ │ → • Ω", "größe")),
    ],
)
def test_every_encoding_gets_plain_text(
    monkeypatch: pytest.MonkeyPatch, encoding: str, expected: tuple[str, str, str]
) -> None:
    files = {name: io.TextIOWrapper(io.BytesIO(), encoding) for name in ("stdout", "stderr")}
    for name, file in files.items():
        monkeypatch.setattr(sys, name, file)
    console.write_any_text()
    table = console.ResultTable("model", "size", right=("size",))
    table.add_line("acme/modèle…", "5 GB")
    console.out().print(table)
    console.out().print("████░░ │ → • Ω")
    console.err().print("fehlt: größe")
    shown, told = (file.detach().getvalue().decode(encoding) for file in files.values())
    assert expected[0] in shown and expected[1] in shown and expected[2] in told
