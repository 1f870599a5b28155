"""What `torchrelay up` can be told."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from torchrelay.cli.problems import Problem

PREFERRED_HTTP_PORT = 8080


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Counts, sizes and ports of an embedded install; 0 leaves the choice to the program."""

    host: str = "127.0.0.1"  # where the tenants' door listens; all else stays on loopback
    http_port: int = 0
    grpc_port: int = 0
    num_prefill_workers: int = 1
    num_decode_workers: int = 1
    num_both_workers: int = 0
    arena_bytes: int = 0
    kv_pool_bytes: int = 0
    idle_timeout_s: float = 0.0
    threads: int = 0
    device: str = "cpu"
    log_level: str = "info"


def free_port(host: str = "127.0.0.1", preferred: int = 0) -> int:
    """``preferred`` when nobody listens on it, else any free port. Raises ``Problem`` for an address not ours."""
    for port in (preferred, 0) if preferred else (0,):
        if (bound := _bind(host, port)) is not None:
            return bound
    raise Problem(f"this machine cannot listen on {host}", "give one of its own addresses with --host")


def wanted_port(host: str, port: int) -> int:
    """``port`` itself. Raises ``Problem`` when it is taken."""
    if _bind(host, port) is None:
        raise Problem(f"port {port} of {host} is taken", "choose another, or 0 for any free one")
    return port


def _bind(host: str, port: int) -> int | None:
    with socket.socket() as probe:
        # As servers do: connections of a server that ended a moment ago do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return None
        bound: int = probe.getsockname()[1]
        return bound
