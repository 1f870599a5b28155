"""A process that has imported what text processes need, and forks one for each request (see ``text_programs.py``)."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from torchrelay.gateway.inference.text.processes import text_process

MAX_REQUEST_BYTES = 1 << 16


def fork(arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """The pid of a grandchild, whose parent has ended: it belongs to the nearest subreaper, which is the client."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        if pid := os.fork():
            os.write(write, str(pid).encode())
            os._exit(0)
        become(arguments, descriptors)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pid_of_grandchild:
        return int(pid_of_grandchild.read())


def become(arguments: Sequence[str], descriptors: Sequence[int]) -> NoReturn:
    status = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.argv[1:] = arguments
        text_process.main()
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    text_process.warm_up()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
        if not data:
            return
        control.send(str(fork(json.loads(data), descriptors)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
