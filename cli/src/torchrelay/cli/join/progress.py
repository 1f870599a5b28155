"""Terminal output of `torchrelay join`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchrelay.cli.errors import CliError
from torchrelay.cli.views.console import print_error


class JoinProgress:
    """Prints a line per event."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def joins(self, host_id: str, scheduler: str, folder: Path) -> None:
        self._console.print(
            f"Joining {scheduler} as {host_id}; logs in {folder / 'logs'}; Ctrl-C leaves", soft_wrap=True
        )

    def scheduler_away(self, address: str) -> None:
        self._console.print(f"waiting for the scheduler at {address}: is `up` running, and this port reachable?")

    def starting(self, names: Iterable[str]) -> None: ...

    def ready(self, name: str, took_s: float, address: str) -> None:
        self._say(name, Text.assemble(("ready", "green"), f"  {took_s:4.1f} s  ", (address, "dim")))

    def ended(self, name: str, how: str, wait_s: float) -> None:
        self._say(name, Text(f"{how}; restarting in {wait_s:g} s", style="yellow"))

    def failed(self, error: CliError) -> None:
        print_error(error)

    def disk(self, message: str) -> None:
        self._say("disk", Text(message, style="yellow"))

    def stopping(self) -> None:
        self._console.print("leaving ... (press Ctrl-C again to kill)")

    def stopped(self) -> None:
        self._console.print("left")

    def _say(self, name: str, what: Text) -> None:
        self._console.print(Text.assemble("  ", (f"{name:<12}", "bold"), "  ", what))
