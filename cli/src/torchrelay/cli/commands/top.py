"""`torchrelay top`: the cluster, live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from torchrelay.cli.api.access import HomeOption, SchedulerOption

if TYPE_CHECKING:
    from torchrelay.common.identity.tls import Tls

EXAMPLE = "Example:  torchrelay top\n\nOnce:     torchrelay top --once\n\nScripts:  torchrelay top --json"
REFRESH_PER_S = 4


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one view as a JSON object and exit.")] = False,
    scheduler: SchedulerOption = None,
    home: HomeOption = None,
) -> None:
    """Watch relays, workers, copies of packs, instances and demand; Ctrl-C quits."""
    from torchrelay.cli.api.scheduler_client import scheduler_access

    address, tls, token, may_return = scheduler_access(home, scheduler)
    if once or as_json or not sys.stdout.isatty():
        _print_once(address, tls, token, as_json)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            follow(address, may_return, tls, token)


def _print_once(address: str, tls: Tls | None, token: str, as_json: bool) -> None:
    from google.protobuf.json_format import MessageToDict

    from torchrelay.cli.api.scheduler_client import watch
    from torchrelay.cli.views import console
    from torchrelay.cli.views.cluster import cluster_screen

    for view in watch(address, tls, token):
        if as_json:
            as_dict = MessageToDict(view, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            console.print_json(as_dict)
        else:
            console.out().print(cluster_screen(view, {}, address))
        return


def follow(
    address: str, may_return: Callable[[], bool], tls: Tls | None = None, token: str = "", **limits: float
) -> None:
    """Draws until interrupted; takes the ``limits`` of ``resumed``, and raises its errors."""
    from rich.live import Live

    from torchrelay.cli.api.scheduler_client import resumed, watch
    from torchrelay.cli.views import console
    from torchrelay.cli.views.cluster import LiveScreen

    screen = LiveScreen(address, time.monotonic)
    live = Live(get_renderable=screen.render, console=console.out(), screen=True, refresh_per_second=REFRESH_PER_S)
    with live:
        for view in resumed(lambda: watch(address, tls, token), may_return, screen.lost, **limits):
            screen.show(view)
