"""Starts Torchrelay's programs as copies of a process that has imported them.

A start of the platform takes 8 to 10 s of CPU, and 7 of them are imports of PyTorch and other libraries. ``Program``
is a ``Popen`` whose processes are forked from a template (``tests/support/template.py``) instead. Benches start every
program as a user does, and so do the tests of the demo, of the wheels, of the lab and of the fleets.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torchrelay.common.process import parent_death

SCRIPTS = Path(sys.executable).parent  # of the programs
ROOT = Path(__file__).parents[2]
# In the order in which the template imports them.
PROGRAMS = ("torchrelay-param-store", "torchrelay-worker", "torchrelay-scheduler", "torchrelay-gateway", "torchrelay")
MIGRATION = "torchrelay.gateway.sql.schema"  # the module that a gateway runs on a new database
TEXT_PROCESS = "text_process.py"  # the script that a gateway runs: from a template of its own, as its memory is limited
MAX_REQUEST_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class Program(subprocess.Popen[Any]):
    """A ``Popen`` of a command. A command of Torchrelay is forked from a template, if there is one."""

    # To the templates, children of this process; True: of text processes.
    controls: ClassVar[dict[bool, socket.socket]] = {}
    starts_templates = True  # when they are needed
    _templates: ClassVar[list[subprocess.Popen[bytes]]] = []
    _lock = threading.Lock()

    @classmethod
    def prepare(cls) -> None:
        """Starts the template of programs, which takes seconds, so that no test waits for it."""
        cls._control(False, os.environ)

    @classmethod
    def _control(cls, of_texts: bool, env: Mapping[str, str]) -> socket.socket:
        """A connection to a template, which ends with this process. ``env``: of text processes, when they begin."""
        if of_texts not in cls.controls:
            cls.controls[of_texts], there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = (sys.executable, "-m", "tests.support.template", str(there.fileno()), str(of_texts))
            started = subprocess.Popen(command, pass_fds=[there.fileno()], cwd=ROOT, env=env if of_texts else None)
            there.close()
            cls._templates.append(started)
        return cls.controls[of_texts]

    def _execute_child(self, args: Any, *others: Any) -> None:  # Popen's hook
        command, is_tied = _without_tie([*map(str, args)] if isinstance(args, (list, tuple)) else [str(args)])
        _, _, _, pass_fds, cwd, env, _, _, _, *descriptors = others[:15]
        env, program = dict(os.environ if env is None else env), _program_of(command)
        of_texts = program == TEXT_PROCESS
        has_template = program is not None and (self.starts_templates or of_texts in self.controls)
        has_own_modules = not of_texts and env.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
        if not has_template or pass_fds or has_own_modules:
            super()._execute_child(args, *others)  # type: ignore[misc]  # absent from the stubs
            return
        stdin, pipe_in, pipe_out, stdout, pipe_err, stderr = descriptors
        has_session = others[-2]
        request = {
            "program": program,
            "arguments": command[3:] if of_texts else command,
            "cwd": str(cwd or Path.cwd()),
            "env": env,
            "parent": os.getpid(),
            "is_tied": is_tied,
            "has_session": has_session,
        }
        given = [own if own != -1 else inherited for own, inherited in ((stdin, 0), (stdout, 1), (stderr, 2))]
        try:
            with self._lock:
                self.pid = _ask(self._control(of_texts, env), request, given)
            self._child_created = True
        finally:
            self._close_pipe_fds(stdin, pipe_in, pipe_out, stdout, pipe_err, stderr)  # type: ignore[attr-defined]


def fork_programs(control: socket.socket | None = None) -> None:
    """From now on this process forks programs that it starts; ``control`` leads to a template that runs already."""
    if control is not None:
        Program.controls, Program.starts_templates = {False: control}, False
    subprocess.Popen = Program  # type: ignore[misc]


def _program_of(command: Sequence[str]) -> str | None:
    """The program that a template can fork for the command."""
    if command[:3] == [sys.executable, "-m", MIGRATION]:
        return MIGRATION
    if command[:3] == [sys.executable, "-I", "-B"] and Path(command[3]).name == TEXT_PROCESS:
        return TEXT_PROCESS
    path = Path(command[0])
    return path.name if path.parent == SCRIPTS and path.name in PROGRAMS else None


def _without_tie(args: list[str]) -> tuple[list[str], bool]:
    """The command that ``tied_to_this_process`` has wrapped, if it has."""
    is_tied = args[:4] == [sys.executable, "-I", "-S", parent_death.__file__]
    return (args[5:] if is_tied else args), is_tied


def _ask(control: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> int:
    """The pid of the new process, which is a child of this one: its first parent ends while this is a subreaper."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(control, [json.dumps(request).encode()], descriptors)
        return int(control.recv(32))
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)
