"""Undisturbed relays on shaped links: one hop, a chain of seven, a star, and gloo's broadcast for comparison."""

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


def measure_chain(relays: RelayLab, ledger: FigureTable, pack: RawPack, num_samples: int) -> float:
    """One hop over iperf3, and the chain over one hop; returns the chain's median time in seconds."""
    limit = relays.iperf3_bytes_per_s(SOURCE, TARGETS[0])
    ones, sevens = [], []
    for _ in range(num_samples):
        ones.append(relays.fill_one(TARGETS[0], pack, [SOURCE]).took_s)
        rate = pack.num_bytes / ones[-1]
        ledger.note("link_use", rate / limit, f"{rate / MB:.1f} MB/s, iperf3 {limit / MB:.1f} MB/s")
        before = relays.lab[SOURCE].bytes_out()
        filled, first_s = _chain_with_first_layer(relays, pack)
        sent = relays.lab[SOURCE].bytes_out() - before
        sevens.append(filled.took_s)
        ledger.note("source_packs", sent / pack.num_bytes, f"{sent / MB:.1f} MB left the source's link, headers too")
        ledger.note("first_layer_fraction", first_s / filled.took_s, f"{first_s:.3f} s of {filled.took_s:.3f} s")
        _note_chain(ledger, pack, ones[-1], filled)
    return statistics.median(sevens)


def _note_chain(ledger: FigureTable, pack: RawPack, one_s: float, filled: Filled) -> None:
    bound = 1 + (len(TARGETS) - 1) / pack.manifest.num_chunks
    against = f"{filled.took_s:.3f} s over {one_s:.3f} s, pipeline's bound {bound:.3f}"
    ledger.note("chain7_over_1", filled.took_s / one_s, against)


def measure_embeddings(relays: RelayLab, ledger: FigureTable, megabytes: int) -> None:
    """The first layer where the embeddings are a quarter of the pack."""
    pack = relays.pack(megabytes, embedding_share=0.25)
    filled, first_s = _chain_with_first_layer(relays, pack)
    relays.forget(pack)
    against = f"{first_s:.3f} s of {filled.took_s:.3f} s, embeddings are 0.25"
    ledger.note("first_layer_embeddings", first_s / filled.took_s, against)


def _chain_with_first_layer(relays: RelayLab, pack: RawPack) -> tuple[Filled, float]:
    """Runs a chain and empties it again; seconds until the last host could compute its first layer."""
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


def measure_star(relays: RelayLab, ledger: FigureTable, megabytes: int) -> None:
    """Every target fetches from the source itself."""
    pack = relays.pack(megabytes)
    one_s = relays.fill_one(TARGETS[0], pack, [SOURCE]).took_s
    relays.begin([relays.stores.relay(target, pack, [SOURCE]) for target in TARGETS])
    filled = relays.await_filled(TARGETS, pack)
    relays.stores.drop(TARGETS, pack)
    relays.forget(pack)
    ledger.note("star7_over_1", filled.took_s / one_s, f"{filled.took_s:.3f} s over {one_s:.3f} s")


def measure_gloo(relays: RelayLab, ledger: FigureTable, megabytes: int, num_samples: int) -> None:
    """torch.distributed's broadcast of the same bytes to the same seven hosts."""
    pack = relays.pack(megabytes)
    one_s = relays.fill_one(TARGETS[0], pack, [SOURCE]).took_s
    relays.forget(pack)
    places = [f"{relays.lab[name].namespace}={relays.lab[name].address}" for name in (SOURCE, *TARGETS)]
    command = [sys.executable, str(_GLOO), str(megabytes * MB), str(num_samples), *places]
    process = relays.lab[SOURCE].spawn(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    overdue = threading.Timer(_GLOO_S, process.kill)
    overdue.start()
    said = process.communicate()[0].decode(errors="replace")
    overdue.cancel()
    if process.returncode != 0:
        raise RuntimeError(f"gloo's broadcast ended with status {process.returncode}: {said[-500:]}")
    samples = [float(line) for line in said.splitlines()[-num_samples:]]
    took_s = statistics.median(samples)
    ledger.note("gloo7_over_1", took_s / one_s, f"torch.distributed broadcast {took_s:.3f} s ({spread(samples)})")
