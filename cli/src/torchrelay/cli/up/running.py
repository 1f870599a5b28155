"""The life of `torchrelay up`, from the lock on the home to the last child stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager

from torchrelay.cli.console import out
from torchrelay.cli.home import Home
from torchrelay.cli.up.elsewhere import check_elsewhere
from torchrelay.cli.up.herald import Herald
from torchrelay.cli.up.options import UpOptions
from torchrelay.cli.up.ports import Ports
from torchrelay.cli.up.stack import StackPlan
from torchrelay.cli.up.supervisor import Supervisor
from torchrelay.cli.up.tls import tls_of_install
from torchrelay.common.service import announced


async def run_up(home: Home, options: UpOptions, is_quiet: bool = False) -> None:
    """Runs the platform until SIGINT or SIGTERM; a second signal ends it at once. ``is_quiet``: without advice."""
    home.make()
    with home.owned(), closing(Ports()) as ports:
        await check_elsewhere(os.environ)
        stack = StackPlan(home, options, ports, tls_of_install(home, options)).stack()
        herald = Herald(home, out(), is_quiet=is_quiet)
        if stack.missed_http_port:
            herald.missed_port(stack.missed_http_port, stack.endpoints["http"])
        stop, supervisor = asyncio.Event(), Supervisor(stack, herald)

        def signalled() -> None:
            if stop.is_set():
                supervisor.kill_all()
            stop.set()

        @contextmanager
        def up() -> Iterator[None]:
            home.note_http_port(stack.http_port)
            herald.up(stack.endpoints)
            with announced(home.endpoints_file, stack.endpoints):
                yield

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled)
        try:
            await supervisor.run(up, stop)
        finally:
            if stack.arena is not None:
                stack.arena.unlink(missing_ok=True)  # the store removes it itself unless it was killed
        herald.stopped()
