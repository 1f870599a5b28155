"""The holder's door: serves buffers to those who bring a ticket, chunk by chunk, as they become ready."""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.transfer.buffers import Buffer


class HolderServer:
    """Threads and raw TCP; one per store and per worker."""

    def __init__(
        self,
        holder_id: str,
        node_key: bytes,
        find: Callable[[str], Buffer | None],
        host: str,
        port: int = 0,
        find_timeout_s: float = 2.0,
    ) -> None:
        raise NotImplementedError

    @property
    def address(self) -> str:
        raise NotImplementedError

    @property
    def bytes_sent(self) -> int:
        raise NotImplementedError

    def start(self) -> None: ...
    def close(self) -> None: ...
