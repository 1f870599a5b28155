"""A KV stream alone, beside a relay in the opposite direction, and beside a relay in the same direction."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.data_plane.figures import FigureTable
from bench.data_plane.lab import MB, RATE_MBIT, SOURCE, RelayLab, await_port
from bench.report import percentile
from tests.lab.raw_pack import RawPack

# KV goes from prefill to decode; the relay goes in either direction.
_PREFILL, _DECODE = "h1", "h2"
# A prompt's KV: 85 tokens of the 583 MB checkpoint that bench/engine.py serves, and 21 of them.
BUFFER_BYTES, SMALL_BUFFER_BYTES = 4 << 20, 1 << 20
KV_BYTES_PER_S = 0.3 * RATE_MBIT * MB / 8
_PORT = 7600
_SOON_S = 0.3
_PROGRAM = Path(__file__).with_name("kv_stream.py")


def measure_kv(relays: RelayLab, table: FigureTable, megabytes: int, num_pairs: int, seconds: float) -> None:
    """Measures ``num_pairs`` times the P99 of a buffer's time, alone and beside a relay in either direction.

    Small buffers, which a queue on the path delays relatively more, are measured for half as long.
    """
    stores, pack = relays.stores, relays.pack(megabytes)
    with kv_stream(relays) as stream:
        stream.times_s(1.0, BUFFER_BYTES)  # warm-up of both ends
        for _ in range(num_pairs):
            alone = stream.p99s_s(seconds)
            for direction, holder, follower in (
                ("opposite", _DECODE, _PREFILL),
                ("same", _PREFILL, _DECODE),
            ):
                relays.begin([stores.relay(holder, pack, [SOURCE])])
                stores.await_whole([holder], pack)
                with relaying(relays, pack, holder, follower) as relayed:
                    beside = stream.p99s_s(seconds)
                stores.drop([holder], pack)
                rate = relayed.num_packs * pack.num_bytes / (1.5 * seconds)
                for size in alone:
                    times = f"P99 {beside[size] * 1000:.1f} ms, alone {alone[size] * 1000:.1f} ms"
                    growth = beside[size] / alone[size] - (direction == "opposite")
                    table.note(f"{size}_p99_{direction}", growth, f"{times}; the relay had {rate / MB:.0f} MB/s")
    relays.forget(pack)


@dataclass(frozen=True, slots=True)
class KvStream:
    """The running ends of a stream (kv_stream.py)."""

    holder: subprocess.Popen[bytes]
    follower: subprocess.Popen[bytes]

    def p99s_s(self, seconds: float) -> dict[str, float]:
        """P99 of seconds per buffer, by buffer size."""
        return {
            "kv": percentile(self.times_s(seconds, BUFFER_BYTES), 99),
            "kv_1mb": percentile(self.times_s(seconds / 2, SMALL_BUFFER_BYTES), 99),
        }

    def times_s(self, seconds: float, buffer_bytes: int) -> list[float]:
        """Seconds of each buffer in a stream at 30% of the link's rate."""
        order = f"{time.monotonic() + _SOON_S} {seconds} {KV_BYTES_PER_S} {buffer_bytes}\n".encode()
        for end in (self.holder, self.follower):
            assert end.stdin is not None
            end.stdin.write(order)
            end.stdin.flush()
        assert self.follower.stdout is not None
        line = self.follower.stdout.readline()
        if not line:
            raise RuntimeError(f"the follower of KV ended with status {self.follower.wait()}")
        taken: list[float] = json.loads(line)
        return taken


@contextmanager
def kv_stream(relays: RelayLab) -> Iterator[KvStream]:
    prefill, decode = relays.lab[_PREFILL], relays.lab[_DECODE]
    about = [secrets.token_hex(32), prefill.address, str(_PORT)]
    with ExitStack() as closing:
        holder = prefill.spawn([sys.executable, str(_PROGRAM), "hold", *about], stdin=subprocess.PIPE)
        closing.callback(_end, holder)
        await_port(prefill, _PORT)
        command = [sys.executable, str(_PROGRAM), "follow", *about]
        follower = decode.spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        closing.callback(_end, follower)
        yield KvStream(holder, follower)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.communicate(timeout=10)


@dataclass(slots=True)
class Relayed:
    """Number of packs that the relay moved, with the fraction of the last pack."""

    num_packs: float = 0.0


@contextmanager
def relaying(relays: RelayLab, pack: RawPack, holder: str, follower: str) -> Iterator[Relayed]:
    """Relays a pack repeatedly while the block runs. Raises the errors of these relays."""
    stores, relayed, stop = relays.stores, Relayed(), threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            while not stop.is_set():
                stores.relay(follower, pack, [holder]).result()
                for report in stores.reports(follower):
                    (copy,) = report.copies
                    if stop.is_set() or copy.error or copy.num_chunks == copy.num_chunks_verified > 0:
                        break
                relayed.num_packs += copy.num_chunks_verified / copy.num_chunks
                stores.drop([follower], pack)
        except Exception as error:  # raised below, in the thread that measures
            failures.append(error)

    thread = threading.Thread(target=run, name="relaying")
    thread.start()
    try:
        yield relayed
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]
