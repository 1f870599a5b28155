"""The relay against the limits of its links: chains, stars, repair, striping, KV beside it, and unshaped loopback.

    python bench/relay.py [--quick]

Hosts are network namespaces, each direction of their links held to 400 Mbit/s (see tests/lab); each runs a real
param-store, driven by the scheduler's RPCs. Needs root, iproute2 and iperf3.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.data_plane.chain import measure_chain, measure_embeddings, measure_gloo, measure_star
from bench.data_plane.faults import measure_kill, measure_silent, measure_slow, measure_striping
from bench.data_plane.figures import FigureTable
from bench.data_plane.kv import BUFFER_BYTES, measure_kv
from bench.data_plane.lab import RATE_MBIT, TARGETS, RelayLab, relay_lab
from bench.data_plane.loopback import measure_loopback
from bench.data_plane.replay import measure_replays
from bench.report import finish, parser_of


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes of the measurement in megabytes, seconds and samples.

    ``pack_mb``: the pack of all figures relative to the undisturbed chain; its number of chunks sets the pipeline
    delay. Stars, broadcasts and replays, and the transfers they are compared with, use a smaller pack.
    """

    num_samples: int
    pack_mb: int
    small_pack_mb: int
    num_kv_pairs: int
    kv_s: float
    kv_pack_mb: int
    num_loopback_samples: int
    loopback_mb: int


QUICK = Effort(1, 64, 8, 1, 2.0, 32, 3, 256)
FULL = Effort(5, 64, 64, 5, 10.0, 64, 5, 1000)


def main() -> None:
    parser = parser_of(__doc__, "fewer samples and smaller packs, under 50 s")
    effort = QUICK if parser.parse_args().quick else FULL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts are removed on termination
    table = FigureTable()
    with table.case("loopback_over_iperf3", "two_hops_over_iperf3", "rss_mb"):
        measure_loopback(table, effort.loopback_mb, effort.num_loopback_samples)
    with table.rest(), relay_lab() as relays:
        measure_in_lab(relays, table, effort)
    finish("relay", conditions(effort), table.checks())


def measure_in_lab(relays: RelayLab, table: FigureTable, effort: Effort) -> None:
    small = effort.small_pack_mb
    pack = relays.pack(effort.pack_mb)
    undisturbed_s = float("nan")
    with case(relays, table, "link_use", "chain7_over_1", "source_packs", "first_layer_fraction"):
        undisturbed_s = measure_chain(relays, table, pack, effort.num_samples)
    for _ in range(effort.num_samples):
        with case(relays, table, "striping"):
            measure_striping(relays, table, pack)
        with case(relays, table, "repair_kill"):
            measure_kill(relays, table, pack, undisturbed_s)
        with case(relays, table, "repair_slow"):
            measure_slow(relays, table, pack, undisturbed_s)
        with case(relays, table, "repair_silent"):
            measure_silent(relays, table, pack, undisturbed_s)
    relays.forget(pack)
    with case(relays, table, "first_layer_embeddings"):
        measure_embeddings(relays, table, effort.pack_mb)
    with case(relays, table, "star7_over_1"):
        measure_star(relays, table, small)
    with case(relays, table, "gloo7_over_1"):
        measure_gloo(relays, table, small, min(effort.num_samples, 3))
    with case(relays, table, *(f"{size}_p99_{way}" for size in ("kv", "kv_1mb") for way in ("opposite", "same"))):
        measure_kv(relays, table, effort.kv_pack_mb, effort.num_kv_pairs, effort.kv_s)
    with case(relays, table, "replayed_over_predicted"):
        measure_replays(relays, table, small)


@contextmanager
def case(relays: RelayLab, table: FigureTable, *names: str) -> Iterator[None]:
    """Runs a case of the lab; after a failure the next case starts with fresh stores."""
    with table.case(*names):
        try:
            yield
        except Exception:
            relays.renew()
            raise


def conditions(effort: Effort) -> dict[str, Any]:
    return {
        **asdict(effort),
        "rate_mbit": RATE_MBIT,
        "targets": len(TARGETS),
        "kv_buffer_bytes": BUFFER_BYTES,
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
    }


if __name__ == "__main__":
    main()
