"""`torchrelay events`: what happened and why, one line per event."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from torchrelay.cli.api.access import HomeOption, SchedulerOption
from torchrelay.cli.views import console

if TYPE_CHECKING:
    from torchrelay.common.identity.tls import Tls
    from torchrelay.control.v1.scheduler_pb2 import Event

EXAMPLE = "Example:  torchrelay events --kind relay --follow\n\nOr:       torchrelay events --since 2h --json"


class EventKind(enum.StrEnum):
    """First words of event kinds."""

    RELAY = "relay"
    INSTANCE = "instance"
    SCALE = "scale"
    COPY = "copy"
    STORE = "store"
    MODEL = "model"


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new events; Ctrl-C quits.")] = False,
    kind: Annotated[list[EventKind] | None, typer.Option(help="Only this kind; repeatable.")] = None,
    since: Annotated[str, typer.Option(help="How far back: 30s, 10m, 2h, 7d.", metavar="AGO")] = "10m",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    scheduler: SchedulerOption = None,
    home: HomeOption = None,
) -> None:
    """Show what the platform did and why: relays, instances, scaling, copies, models. Kept for 30 days."""
    from torchrelay.cli.api.scheduler_client import scheduler_access
    from torchrelay.cli.views import event_lines

    try:
        from_unix_us = int((datetime.now() - event_lines.parse_duration(since)).timestamp() * 1e6)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(str(error), param_hint="--since") from error
    address, tls, token, may_return = scheduler_access(home, scheduler)
    kinds = [str(name) for name in kind or ()]
    source = EventTail(address, tls, kinds, max(from_unix_us, 1), token)
    with contextlib.suppress(KeyboardInterrupt):
        num_printed = _print(source.tail(may_return) if follow else source.once(), as_json)
        if not num_printed:
            of_kinds = f" of kind {' or '.join(kinds)}" if kinds else ""
            console.err().print(f"no events{of_kinds} in the last {since}; --since looks further back")


def _print(events: Iterator[Event], as_json: bool) -> int:
    """Prints the events as they come; returns their number."""
    from torchrelay.cli.views.event_lines import EventLines, json_line

    lines, out = EventLines(), console.out()
    num_printed = 0
    for event in events:
        num_printed += 1
        if as_json:
            print(json_line(event), flush=True)
        else:
            out.print(lines.line(event, datetime.now(), out.width if out.is_terminal else None), soft_wrap=True)
    return num_printed


class EventTail:
    """A scheduler's events from a time on; resumes after the last one seen."""

    def __init__(self, address: str, tls: Tls | None, kinds: Sequence[str], from_unix_us: int, token: str = "") -> None:
        self._address, self._tls, self._token, self._kinds = address, tls, token, kinds
        self._from_unix_us = from_unix_us
        self._last_sequence = 0

    def once(self, follow: bool = False) -> Iterator[Event]:
        """The events so far; with ``follow``, new ones until the connection breaks. Raises ``CliError``."""
        from torchrelay.cli.api.scheduler_client import events

        kinds, begin = self._kinds, self._from_unix_us
        for event in events(self._address, kinds, begin, self._last_sequence, follow, self._tls, self._token):
            self._last_sequence = event.sequence
            yield event

    def tail(self, may_return: Callable[[], bool], **limits: float) -> Iterator[Event]:
        """Events until interrupted; takes the ``limits`` of ``resumed``, and raises its errors."""
        from torchrelay.cli.api.scheduler_client import resumed

        return resumed(lambda: self.once(follow=True), may_return, lambda: None, **limits)
