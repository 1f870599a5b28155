"""`torchrelay events`: what happened and why, one line per event."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrelay.cli.api.access import AdminKeyOption, HomeOption, UrlOption, admin_access
from torchrelay.cli.views import console

if TYPE_CHECKING:
    from torchrelay.cli.api.client import GatewayClient
    from torchrelay.cli.views.event_lines import Event

EXAMPLE = "Example:  torchrelay events --kind relay --follow\n\nOr:       torchrelay events --since 2h --json"
_PAGE = 1000  # the most that the gateway returns


class EventKind(enum.StrEnum):
    """First words of event kinds."""

    RELAY = "relay"
    INSTANCE = "instance"
    SCALE = "scale"
    COPY = "copy"
    STORE = "store"
    MODEL = "model"
    BUDGET = "budget"


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new events; Ctrl-C quits.")] = False,
    kind: Annotated[list[EventKind] | None, typer.Option(help="Only this kind; repeatable.")] = None,
    since: Annotated[str, typer.Option(help="How far back: 30s, 10m, 2h, 7d.", metavar="AGO")] = "10m",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Show what the platform did and why: relays, instances, scaling, copies, models, budgets. Kept for 30 days."""
    from torchrelay.cli.views import event_lines

    try:
        begin = datetime.now(UTC) - event_lines.parse_duration(since)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(str(error), param_hint="--since") from error
    access = admin_access(home, url, key)
    access.require_admin("events")
    kinds = [str(name) for name in kind or ()]
    with access.client(waits=not follow) as client, contextlib.suppress(KeyboardInterrupt):
        history = EventHistory(client, kinds, begin)
        num_printed = _print(history.tail(access.may_return) if follow else history.rest(), as_json)
        if not num_printed:
            of_kinds = f" of kind {' or '.join(kinds)}" if kinds else ""
            console.err().print(f"no events{of_kinds} in the last {since}; --since looks further back")


def _print(events: Iterable[Event], as_json: bool) -> int:
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


class EventHistory:
    """The events from a time on, read page by page; each is returned once."""

    def __init__(self, client: GatewayClient, kinds: Sequence[str], begin: datetime) -> None:
        self._client, self._kinds = client, kinds
        self._query: dict[str, Any] = {"since": begin.isoformat(), "limit": _PAGE}
        if len(kinds) == 1:  # of several, those of other kinds are skipped here, so that no page reads them again
            self._query["kind"] = kinds[0]
        self._last_sequence = 0

    def rest(self) -> Iterator[Event]:
        """The events so far. Raises ``CliError``."""
        num_read = _PAGE
        while num_read == _PAGE:
            page = self._page()
            num_read = len(page)
            yield from self._of_kinds(page)

    def tail(self, may_return: Callable[[], bool], **limits: float) -> Iterator[Event]:
        """Events until interrupted; takes the ``limits`` of ``looks``, and raises its errors."""
        from torchrelay.cli.api.polling import looks

        pages = looks(self._page, may_return, lambda: None, is_behind=lambda page: len(page) == _PAGE, **limits)
        for page in pages:
            yield from self._of_kinds(page)

    def _page(self) -> list[Event]:
        from torchrelay.cli.api.polling import look

        reply = look(self._client, "/v1/events", **self._query, after=self._last_sequence)
        page: list[Event] = json.loads(reply)["data"]
        if page:
            self._last_sequence = page[-1]["sequence"]
        return page

    def _of_kinds(self, page: Iterable[Event]) -> Iterator[Event]:
        return (event for event in page if not self._kinds or event["kind"].partition(".")[0] in self._kinds)
