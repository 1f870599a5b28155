"""What `torchrelay up` can be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Counts, sizes and ports of an embedded install; 0 leaves the choice to the program."""

    host: str = "127.0.0.1"  # where the tenants' door listens; all else stays on loopback
    http_port: int = 0
    grpc_port: int = 0
    num_prefill_workers: int = 1
    num_decode_workers: int = 1
    num_both_workers: int = 0
    remote: str = ""  # a folder or a URL; empty: below the home
    arena_bytes: int = 0
    kv_pool_bytes: int = 0
    idle_timeout_s: float = 0.0
    threads: int = 0
    device: str = "cpu"
    log_level: str = "info"
    tls: bool = False  # between the services; the tenants' door speaks none
