"""Options of `torchrelay up`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Counts, sizes and ports of an embedded install; 0 means chosen automatically."""

    host: str = "127.0.0.1"  # where the public API listens; everything else stays on loopback
    http_port: int = 0
    grpc_port: int = 0
    num_prefill_workers: int = 1
    num_decode_workers: int = 1
    num_both_workers: int = 0
    remote: str = ""  # a folder or a URL; empty: in the home
    arena_bytes: int = 0
    kv_pool_bytes: int = 0
    idle_timeout_s: float = 0.0
    threads: int = 0
    device: str = "cpu"
    log_level: str = "info"
    tls: bool = False  # between the services, not for the public API
