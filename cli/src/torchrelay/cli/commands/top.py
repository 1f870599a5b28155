"""`torchrelay top`: the cluster, live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from torchrelay.cli.api.access import HomeOption

if TYPE_CHECKING:
    from torchrelay.common.tls import Tls

EXAMPLE = "Example:  torchrelay top\n\nOnce:     torchrelay top --once\n\nScripts:  torchrelay top --json"
RETRY_S = 1.0
RESTART_TIMEOUT_S = 6.0  # a scheduler that is started again answers within this time
REFRESH_PER_S = 4


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one view as a JSON object and end.")] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="Scheduler's gRPC address; by default the local platform's.", metavar="HOST:PORT")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Watch relays, workers, copies of packs, instances and demand as they change; Ctrl-C leaves."""
    from torchrelay.cli.api.scheduler_client import environment_tls, local_tls
    from torchrelay.cli.home import Home

    local = Home.at(home)
    address = scheduler or local.endpoints()["scheduler"]
    tls = environment_tls() if scheduler else local_tls(local.endpoints())
    if once or as_json or not sys.stdout.isatty():
        _print_once(address, tls, as_json)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            follow(address, lambda: scheduler is not None or local.running_pid() is not None, tls)


def _print_once(address: str, tls: Tls | None, as_json: bool) -> None:
    from google.protobuf.json_format import MessageToDict

    from torchrelay.cli.api.scheduler_client import watch
    from torchrelay.cli.views import console
    from torchrelay.cli.views.cluster import cluster_screen

    for view in watch(address, tls):
        if as_json:
            as_dict = MessageToDict(view, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            console.print_json(as_dict)
        else:
            console.out().print(cluster_screen(view, {}, address))
        return


def follow(address: str, may_return: Callable[[], bool], tls: Tls | None = None) -> None:
    """Draws until interrupted. Raises ``Unreachable`` when the scheduler is away for long, or cannot return."""
    from rich.live import Live

    from torchrelay.cli.api.scheduler_client import watch
    from torchrelay.cli.errors import Unreachable
    from torchrelay.cli.views import console
    from torchrelay.cli.views.cluster import LiveScreen

    screen = LiveScreen(address, time.monotonic)
    is_seen, lost_s = False, 0.0
    live = Live(get_renderable=screen.render, console=console.out(), screen=True, refresh_per_second=REFRESH_PER_S)
    with live:
        while True:
            try:
                for view in watch(address, tls):
                    screen.show(view)
                    is_seen, lost_s = True, 0.0
            except Unreachable:
                if not is_seen:
                    raise
            screen.lost()
            lost_s = lost_s or time.monotonic()
            if not may_return():
                raise Unreachable("the platform has stopped", "start it again: torchrelay up")
            if time.monotonic() - lost_s >= RESTART_TIMEOUT_S:
                raise Unreachable(f"the scheduler at {address} answers no more", "is the platform up? torchrelay up")
            time.sleep(RETRY_S)  # it may be starting again
