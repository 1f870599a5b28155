"""What `torchrelay up` can be told."""

from __future__ import annotations

import socket
from dataclasses import dataclass

PREFERRED_HTTP_PORT = 8080


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Counts, sizes and ports of an embedded install; 0 leaves the choice to the program."""

    host: str = "127.0.0.1"
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
    """``preferred`` when nobody listens on it, else any free port."""
    for port in (preferred, 0) if preferred else (0,):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            bound: int = probe.getsockname()[1]
            return bound
    raise OSError(f"no free port on {host}")
