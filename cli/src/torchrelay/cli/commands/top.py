"""`torchrelay top`: the cluster, live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from torchrelay.cli.access import HomeOption

EXAMPLE = "Example:  torchrelay top\n\nOnce:     torchrelay top --once"
RETRY_S = 1.0
REFRESH_PER_S = 4


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="Scheduler's gRPC address; by default the local platform's.", metavar="HOST:PORT")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Watch workers, copies of packs, instances and demand as they change; Ctrl-C leaves."""
    from torchrelay.cli.home import Home

    local = Home.at(home)
    address = scheduler or local.endpoints()["scheduler"]
    if once or not sys.stdout.isatty():
        _print_once(address)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            follow(address, lambda: scheduler is not None or local.running_pid() is not None)


def _print_once(address: str) -> None:
    from torchrelay.cli import console
    from torchrelay.cli.cluster import watch
    from torchrelay.cli.top_view import cluster_screen

    for view in watch(address):
        console.out().print(cluster_screen(view, {}, address))
        return


def follow(address: str, may_return: Callable[[], bool]) -> None:
    """Draws until interrupted. Raises ``Unreachable`` when the scheduler is away for long, or cannot return."""
    from rich.live import Live

    from torchrelay.cli import console
    from torchrelay.cli.cluster import watch
    from torchrelay.cli.problems import Unreachable
    from torchrelay.cli.top_view import Screen

    screen = Screen(address, time.monotonic)
    seen_s = None
    live = Live(get_renderable=screen.render, console=console.out(), screen=True, refresh_per_second=REFRESH_PER_S)
    with live:
        while True:
            try:
                for view in watch(address):
                    screen.show(view)
                    seen_s = time.monotonic()
            except Unreachable:
                if seen_s is None:
                    raise
            screen.lost()
            if not may_return():
                raise Unreachable("the platform has stopped", "start it again: torchrelay up")
            lost_s = lost_s or time.monotonic()
            time.sleep(RETRY_S)  # it may be starting again
