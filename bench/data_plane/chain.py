"""Undisturbed relays on shaped links: a hop, a chain of seven, a star, and gloo's broadcast for comparison."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.data_plane.figures import FigureTable, spread
from bench.data_plane.lab import MB, SOURCE, TARGETS, Filled, RelayLab
from tests.lab.raw_pack import RawPack

_GLOO = Path(__file__).with_name("gloo.py")
_GLOO_S = 120.0


def measure_chain(relays: RelayLab, table: FigureTable, pack: RawPack, num_samples: int) -> float:
    """Measures a hop relative to iperf3 and the chain relative to a hop; returns the chain's median seconds."""
    limit = relays.iperf3_bytes_per_s(SOURCE, TARGETS[0])
    hop_s, chain_s = [], []
    for _ in range(num_samples):
        hop_s.append(relays.fill_one(TARGETS[0], pack, [SOURCE]).took_s)
        rate = pack.num_bytes / hop_s[-1]
        table.note("link_use", rate / limit, f"{rate / MB:.1f} MB/s, iperf3 {limit / MB:.1f} MB/s")
        before = relays.lab[SOURCE].bytes_out()
        filled, first_s = _chain_with_first_layer(relays, pack)
        sent = relays.lab[SOURCE].bytes_out() - before
        chain_s.append(filled.took_s)
        table.note("source_packs", sent / pack.num_bytes, f"{sent / MB:.1f} MB left the source's link, headers too")
        table.note("first_layer_fraction", first_s / filled.took_s, f"{first_s:.3f} s of {filled.took_s:.3f} s")
        bound = 1 + (len(TARGETS) - 1) / pack.manifest.num_chunks
        against = f"{filled.took_s:.3f} s over {hop_s[-1]:.3f} s, pipeline's bound {bound:.3f}"
        table.note("chain7_over_1", filled.took_s / hop_s[-1], against)
    return statistics.median(chain_s)


def measure_embeddings(relays: RelayLab, table: FigureTable, megabytes: int) -> None:
    """Measures the first layer with embeddings that are a quarter of the pack."""
    pack = relays.pack(megabytes, embedding_share=0.25)
    filled, first_s = _chain_with_first_layer(relays, pack)
    relays.forget(pack)
    against = f"{first_s:.3f} s of {filled.took_s:.3f} s, embeddings are 0.25"
    table.note("first_layer_embeddings", first_s / filled.took_s, against)


def _chain_with_first_layer(relays: RelayLab, pack: RawPack) -> tuple[Filled, float]:
    """Runs a chain and empties it; returns seconds until the last host could compute its first layer."""
    arrived_us = 0

    def await_first_layer() -> None:
        nonlocal arrived_us
        with relays.stores.held(TARGETS[-1], pack) as hold:
            for reply in hold:
                if reply.num_segments_ready >= 2:  # the embeddings, and layer 1
                    arrived_us = time.time_ns() // 1000
                    return

    filled = relays.chain(pack, await_first_layer)
    relays.stores.drop(TARGETS, pack)
    return filled, (arrived_us - filled.begin_unix_us) / 1e6


def measure_star(relays: RelayLab, table: FigureTable, megabytes: int) -> None:
    """Measures a star, in which every target fetches from the source."""
    pack = relays.pack(megabytes)
    one_s = relays.fill_one(TARGETS[0], pack, [SOURCE]).took_s
    relays.begin([relays.stores.relay(target, pack, [SOURCE]) for target in TARGETS])
    filled = relays.await_filled(TARGETS, pack)
    relays.stores.drop(TARGETS, pack)
    relays.forget(pack)
    table.note("star7_over_1", filled.took_s / one_s, f"{filled.took_s:.3f} s over {one_s:.3f} s")


def measure_gloo(relays: RelayLab, table: FigureTable, megabytes: int, num_samples: int) -> None:
    """Measures torch.distributed's broadcast of as many bytes to the same seven hosts."""
    pack = relays.pack(megabytes)
    one_s = relays.fill_one(TARGETS[0], pack, [SOURCE]).took_s
    relays.forget(pack)
    places = [f"{relays.lab[name].namespace}={relays.lab[name].address}" for name in (SOURCE, *TARGETS)]
    command = [sys.executable, str(_GLOO), str(megabytes * MB), str(num_samples), *places]
    process = relays.lab[SOURCE].spawn(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    overdue = threading.Timer(_GLOO_S, process.kill)
    overdue.start()
    output = process.communicate()[0].decode(errors="replace")
    overdue.cancel()
    if process.returncode != 0:
        raise RuntimeError(f"gloo's broadcast ended with status {process.returncode}: {output[-500:]}")
    samples = [float(line) for line in output.splitlines()[-num_samples:]]
    took_s = statistics.median(samples)
    table.note("gloo7_over_1", took_s / one_s, f"torch.distributed broadcast {took_s:.3f} s ({spread(samples)})")
