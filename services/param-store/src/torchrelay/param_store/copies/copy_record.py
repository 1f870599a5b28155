"""The history of a pack's copy on this host: times, sources, and the error if it failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.transfer.fetch.statistics import TransferStats


@dataclass(slots=True)
class CopyRecord:
    """The history of a copy, beside the state in its slab. Times are Unix microseconds; 0: not yet."""

    pack_id: str
    pack_bytes: int = 0
    num_chunks: int = 0
    error: str = ""
    begin_unix_us: int = 0
    first_unix_us: int = 0
    end_unix_us: int = 0
    stats: TransferStats = field(default_factory=TransferStats)  # bytes and errors by source

    @property
    def source(self) -> str:
        """The holder that delivered most bytes, or "remote"."""
        return self.stats.largest
