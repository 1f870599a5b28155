"""Terminal output of `torchrelay up`."""

from __future__ import annotations

import errno
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from torchrelay.cli.errors import CliError
from torchrelay.cli.home import DEFAULT_HOME, Home
from torchrelay.cli.up.shared_memory import LeftArena
from torchrelay.cli.views.console import print_error
from torchrelay.common.quantities import format_bytes

EXAMPLE_MODEL = "examples/glossary/model"
_LOST_OUTPUT = (errno.ENOSPC, errno.EIO)  # a file on a full disk, a terminal that closed


def next_steps(folder: Path, venv: Path | None, has_key: bool = False) -> list[str]:
    """Commands to try next in a new terminal in ``folder``; in the repository with its example model.

    ``has_key``: this home has been used before.
    """
    steps = []
    if venv is not None:
        shown = venv.relative_to(folder) if venv.is_relative_to(folder) else venv
        steps.append(f". {shlex.quote(str(shown / 'bin' / 'activate'))}")
    if has_key:
        return [*steps, "torchrelay models", "torchrelay top"]
    has_example = (folder / EXAMPLE_MODEL).is_dir()
    model, name = (EXAMPLE_MODEL, "glossary") if has_example else ("DIR", "mine")
    question = ' "What is a relay?"' if has_example else ""
    return [
        *steps,
        "torchrelay key create --tenant acme",
        f"torchrelay upload {model} --name {name}",
        f"torchrelay chat {name}{question}",
    ]


class StartupProgress:
    """Prints a line per event; while children start, a spinner names those not ready.

    ``is_quiet``: neither what to do next nor that it stops.
    """

    def __init__(self, home: Home, console: Console, *, is_quiet: bool = False) -> None:
        self._home, self._console, self._is_quiet = home, console, is_quiet
        self._begin_s = time.monotonic()
        self._awaited: list[str] = []
        self._spinner: Status = console.status("")
        self._print(f"Starting Torchrelay in [bold]{home.path}[/]")

    def port_taken(self, port: int, url: str) -> None:
        cure = "" if self._is_quiet else f"; to have it once it is free: TORCHRELAY_HTTP_PORT={port}"
        self._print(f"[yellow]port {port} is taken: REST is on {url}{cure}[/]", soft_wrap=True)

    def memory_left(self, left: LeftArena) -> None:
        text = (
            f"{format_bytes(left.num_bytes)} of shared memory are left of the platform at {left.home}, which was"
            f" killed: a start there uses them again; to free them: rm {shlex.quote(str(left.path))}"
        )
        self._print(text, style="yellow", soft_wrap=True, markup=False)

    def starting(self, names: Iterable[str]) -> None:
        self._awaited += names
        self._show_awaited()
        with _output_may_be_lost():
            self._spinner.start()

    def ready(self, name: str, took_s: float, address: str) -> None:
        self._say(name, Text.assemble(("ready", "green"), f"  {took_s:4.1f} s  ", (address, "dim")))
        if name in self._awaited:
            self._awaited.remove(name)
            self._show_awaited()

    def ended(self, name: str, how: str, wait_s: float) -> None:
        self._say(name, Text(f"{how}; restarting in {wait_s:g} s", style="yellow"))

    def failed(self, error: CliError) -> None:
        print_error(error)

    def up(self, endpoints: dict[str, str]) -> None:
        """Everything is up: prints addresses and next steps."""
        self._stop_spinner()
        took_s = time.monotonic() - self._begin_s
        show = self._print
        if self._is_quiet:
            show(f"[bold green]Torchrelay is up[/] after {took_s:.1f} s")
            return
        show(f"\n[bold green]Torchrelay is up[/] after {took_s:.1f} s\n")
        show(f"  REST      {endpoints['http']}/v1")
        show(f"  gRPC      {endpoints['grpc']}")
        show(f"  console   {endpoints['http']}/console")
        show(f"  home      {self._home.path}  [dim](keys, ledger, logs/)[/]")
        show("\nNext, in another terminal:\n")
        if self._home.path != DEFAULT_HOME.absolute():
            show(f"  export TORCHRELAY_HOME={shlex.quote(str(self._home.path))}", soft_wrap=True)
        venv = Path(sys.prefix) if sys.prefix != sys.base_prefix else None
        for line in next_steps(Path.cwd(), venv, self._home.saved_key() is not None):
            show(f"  {line}", soft_wrap=True, markup=False)
        show("\nCtrl-C stops everything.\n")

    def joinable(self, join_file: Path) -> None:
        self._print(f"Other machines join with:  torchrelay join {join_file.name}", soft_wrap=True)
        self._print(f"[dim](a copy of {join_file}, which is secret)[/]", soft_wrap=True)

    def disk(self, message: str) -> None:
        self._say("disk", Text(message, style="yellow"))

    def stopping(self) -> None:
        self._stop_spinner()
        if not self._is_quiet:
            self._print("stopping ... [dim](press Ctrl-C again to kill)[/]")

    def stopped(self) -> None:
        if not self._is_quiet:
            self._print("stopped")

    def _show_awaited(self) -> None:
        with _output_may_be_lost():
            self._spinner.update(f"waiting for {', '.join(self._awaited)}" if self._awaited else "")

    def _stop_spinner(self) -> None:
        with _output_may_be_lost():
            self._spinner.stop()

    def _print(self, *what: Any, **style: Any) -> None:
        with _output_may_be_lost():
            self._console.print(*what, **style)

    def _say(self, name: str, what: Text) -> None:
        self._print(Text.assemble("  ", (f"{name:<12}", "bold"), "  ", what))


@contextmanager
def _output_may_be_lost() -> Iterator[None]:
    """Drops what cannot be written: `up` runs on, and stops in order, without its terminal or log."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST_OUTPUT:
            raise
