"""The data plane over unshaped loopback: one and two hops relative to iperf3, and the stores' memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.data_plane.figures import FigureTable
from bench.data_plane.lab import MB, iperf3_bytes_per_s
from bench.processes import memory_bytes, sampled
from tests.lab import Lab
from tests.lab.raw_pack import publish
from tests.lab.stores import Stores

_HOST = "loopback"
_SOURCE, _FIRST, _SECOND = "source", "a", "b"
_STORES = (_SOURCE, _FIRST, _SECOND)
_IPERF_S = 1.0


def measure_loopback(table: FigureTable, megabytes: int, num_samples: int) -> None:
    """Measures three stores on one host, which reach each other over its loopback."""
    arena_bytes = megabytes * MB + (64 << 20)
    with (
        tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder,
        Lab([_HOST]) as lab,
        Stores(
            lab, Path(folder), dict.fromkeys(_STORES, lab[_HOST]), arena_bytes, ARENA_STEP_BYTES=str(arena_bytes)
        ) as stores,
        peak_rss_bytes([stores.children[name].pid for name in _STORES]) as peak,
    ):
        pack = publish(stores.remote, megabytes * MB)
        stores.fill(_SOURCE, pack)
        for _ in range(num_samples):
            limit = iperf3_bytes_per_s(lab[_HOST], lab[_HOST], _IPERF_S)
            for name, hops in (("loopback_over_iperf3", [_FIRST]), ("two_hops_over_iperf3", [_FIRST, _SECOND])):
                calls = [
                    stores.relay(target, pack, [source]) for source, target in zip([_SOURCE, *hops], hops, strict=False)
                ]
                for call in calls:
                    call.result()
                copies = stores.await_whole(hops[::-1], pack).values()
                begin_us = min(copy.relay_begin_unix_us for copy in copies)
                took_s = (max(copy.relay_end_unix_us for copy in copies) - begin_us) / 1e6
                rate = pack.num_bytes / took_s
                table.note(name, rate / limit, f"{rate / MB:.0f} MB/s, iperf3 {limit / MB:.0f} MB/s")
                stores.drop(hops, pack)
    table.note(
        "rss_mb", max(peak.values()) / MB, f"the largest of {len(_STORES)} stores with {megabytes} MB in the arena"
    )


@contextmanager
def peak_rss_bytes(pids: list[int]) -> Iterator[dict[int, int]]:
    """Yields peak resident sizes of processes while the block runs, without shared memory (the arena)."""
    peak = dict.fromkeys(pids, 0)

    def sample() -> None:
        for pid in pids:
            sizes = memory_bytes(pid)
            peak[pid] = max(peak[pid], sizes.get("RssAnon", 0) + sizes.get("RssFile", 0))

    with sampled(sample):
        yield peak
