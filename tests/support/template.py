"""A process that has imported programs of Torchrelay, and forks one for each request (see ``programs.py``).

The requests of a program that starts others come to a template of its own, which it forks before it does anything else:
a process with gRPC's threads cannot fork.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, NoReturn

from tests.support.programs import MAX_REQUEST_BYTES, MIGRATION, PROGRAMS, TEXT_PROCESS, fork_programs

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_REPARENTED_S = 30.0
_LIBC = ctypes.CDLL(None)


class Template:
    """The programs' functions, and the variables that their packages set when they are imported."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[[], Any]] = {}
        self._variables: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def import_programs(self) -> None:
        before = dict(os.environ)
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # as the gateway has it; read when gRPC is imported
        for name in PROGRAMS:
            (entry_point,) = entry_points(group="console_scripts", name=name)
            self._functions[name] = entry_point.load()
            self._variables[name] = {key: value for key, value in os.environ.items() if before.get(key) != value}
        importlib.import_module("alembic.command")
        self._functions[MIGRATION] = importlib.import_module(MIGRATION).main
        self._variables[MIGRATION] = self._variables["torchrelay-gateway"]

    def import_text_process(self) -> None:
        text_process = importlib.import_module("torchrelay.gateway.inference.text.processes.text_process")
        text_process.warm_up()
        self._functions[TEXT_PROCESS] = text_process.main

    def serve(self, control: socket.socket) -> None:
        """Forks a program for each request, and answers with its pid, until the other end is closed."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
            if not data:
                return
            pid = self._fork(json.loads(data), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(str(pid).encode())

    def _fork(self, request: Mapping[str, Any], descriptors: list[int]) -> int:
        """The pid of a grandchild, whose parent has ended: it belongs to the nearest subreaper, which is the client."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                if program := os.fork():
                    os.write(write, str(program).encode())
                    os._exit(0)
                self._become(request, descriptors)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(write)
        os.waitpid(child, 0)
        with os.fdopen(read) as pid:
            return int(pid.read())

    def _become(self, request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
        parent = request["parent"]
        deadline = time.monotonic() + _REPARENTED_S
        while os.getppid() != parent and time.monotonic() < deadline:
            time.sleep(0.0005)
        if request["is_tied"]:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        if request["has_session"]:
            os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", 1, "utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
        os.chdir(request["cwd"])
        name = request["program"]
        _LIBC.prctl(_PR_SET_NAME, name.encode())
        os.environ.clear()
        os.environ.update({**self._variables[name], **request["env"]})
        sys.argv = request["arguments"]
        sys.modules["__main__"].__package__ = None  # click takes the program's name from it
        if name == "torchrelay-gateway" or (name == "torchrelay" and {"up", "join"} & {*sys.argv}):
            self._stay_beside()
        os._exit(_status_of(self._functions[name]))

    def _stay_beside(self) -> None:
        """Forks a template that starts the processes of this one."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            here.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: this ends after its program
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.serve(there)
            os._exit(0)
        there.close()
        fork_programs(here)


def _status_of(function: Callable[[], Any]) -> int:
    """The exit status of a program, after what an interpreter does at its end."""
    atexit._clear()
    status: Any = 0
    try:
        status = function()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return int(status or 0)


def main() -> None:
    control, of_texts = socket.socket(fileno=int(sys.argv[1])), sys.argv[2] == "True"
    template = Template()
    gc.disable()
    if of_texts:
        template.import_text_process()
    else:
        template.import_programs()
    gc.collect()
    gc.freeze()
    gc.enable()
    template.serve(control)


if __name__ == "__main__":
    main()
