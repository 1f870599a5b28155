"""Runs `ip`, `tc` and `bridge`, and checks what they need of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from typing import Literal


class LabError(RuntimeError):
    """The machine cannot run the lab, or a command failed; the message says which, and how to fix it."""


def require_machine() -> None:
    """Raise LabError, with the fix, unless this process may create namespaces and has the commands for it."""
    missing = [command for command in ("ip", "tc", "bridge") if shutil.which(command) is None]
    if missing:
        raise LabError(f"the lab needs {' and '.join(missing)}, not found on PATH: apt-get install iproute2")
    if os.geteuid() != 0:
        raise LabError("the lab makes network namespaces, which only root may: run it as root (sudo -E ...)")


def ip(*arguments: str) -> str:
    """Run `ip ARGUMENTS`; its output. Raises LabError with what `ip` said."""
    return _run(["ip", *arguments])


def batch(program: Literal["ip", "bridge"], namespace: str, lines: Iterable[str]) -> None:
    """Run many commands of ``program`` in ``namespace`` as one process, stopping at the first that fails."""
    _run([program, "-n", namespace, "-batch", "-"], stdin="".join(f"{line}\n" for line in lines))


def tc(namespace: str, *arguments: str) -> None:
    """Run `tc ARGUMENTS` in ``namespace``. Raises LabError with what `tc` said."""
    _run(["tc", "-n", namespace, *arguments])


def _run(command: list[str], stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise LabError(
            f"`{' '.join(command)}` failed with status {done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout
