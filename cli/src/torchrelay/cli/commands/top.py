"""`torchrelay top`: the cluster, live."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Annotated, Any

import typer

from torchrelay.cli.api.access import Access, AdminKeyOption, HomeOption, UrlOption, admin_access

EXAMPLE = "Example:  torchrelay top\n\nOnce:     torchrelay top --once\n\nScripts:  torchrelay top --json"
REFRESH_PER_S = 4


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one view as a JSON object and exit.")] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Watch relays, workers, copies of packs, instances and demand; Ctrl-C quits."""
    access = admin_access(home, url, key)
    access.require_admin("top")
    if once or as_json or not sys.stdout.isatty():
        _print_once(access, as_json)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            follow(access)


def _print_once(access: Access, as_json: bool) -> None:
    from torchrelay.cli.api.polling import cluster_view, look
    from torchrelay.cli.views import console
    from torchrelay.cli.views.cluster import cluster_screen

    with access.client() as client:
        if as_json:
            console.print_json(json.loads(look(client, "/v1/cluster")))
        else:
            console.out().print(cluster_screen(cluster_view(client), {}, access.url))


def follow(access: Access, **limits: Any) -> None:
    """Draws until interrupted; takes the ``limits`` of ``looks``, and raises its errors."""
    from rich.live import Live

    from torchrelay.cli.api.polling import cluster_view, looks
    from torchrelay.cli.views import console
    from torchrelay.cli.views.cluster import LiveScreen

    screen = LiveScreen(access.url, time.monotonic)
    live = Live(get_renderable=screen.render, console=console.out(), screen=True, refresh_per_second=REFRESH_PER_S)
    with live, access.client(waits=False) as client:
        for view in looks(lambda: cluster_view(client), access.may_return, screen.lost, **limits):
            screen.show(view)
