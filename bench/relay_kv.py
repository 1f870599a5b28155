"""A KV stream alone, beside a relay in the opposite direction, and beside one in its own."""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.relay_figures import Ledger
from bench.relay_lab import MB, RATE_MBIT, SOURCE, RelayLab, await_port
from tests.lab.raw_pack import RawPack

# KV goes from one to the other; the relay between them goes either way.
_PREFILL, _DECODE = "h1", "h2"
BUFFER_BYTES = 1 << 20
KV_BYTES_PER_S = 0.3 * RATE_MBIT * MB / 8
_PORT = 7600
_PROGRAM = Path(__file__).with_name("relay_kv_stream.py")


def measure_kv(relays: RelayLab, ledger: Ledger, megabytes: int, num_pairs: int, seconds: float) -> None:
    """``num_pairs`` times: the P99 of a buffer's time alone, and beside a relay either way."""
    stores, pack = relays.stores, relays.pack(megabytes)
    with kv_stream(relays) as stream:
        stream.p99_s(1.0)  # both ends have run once
        for _ in range(num_pairs):
            alone_s = stream.p99_s(seconds)
            for name, holder, follower in (
                ("kv_p99_opposite", _DECODE, _PREFILL),
                ("kv_p99_same", _PREFILL, _DECODE),
            ):
                relays.begin([stores.relay(holder, pack, [SOURCE])])
                stores.await_whole([holder], pack)
                with relaying(relays, pack, holder, follower) as relayed:
                    beside_s = stream.p99_s(seconds)
                stores.drop([holder], pack)
                rate = relayed.num_packs * pack.num_bytes / seconds
                against = (
                    f"P99 {beside_s * 1000:.1f} ms, alone {alone_s * 1000:.1f} ms; the relay had {rate / MB:.0f} MB/s"
                )
                ledger.note(name, beside_s / alone_s - (name == "kv_p99_opposite"), against)
    relays.forget(pack)


@dataclass(frozen=True, slots=True)
class KvStream:
    """The running ends of a stream; see relay_kv_stream.py."""

    follower: subprocess.Popen[bytes]

    def p99_s(self, seconds: float) -> float:
        """The P99 of a buffer's time, of buffers at 30% of the link for so long."""
        assert self.follower.stdin is not None and self.follower.stdout is not None
        self.follower.stdin.write(f"{seconds} {KV_BYTES_PER_S}\n".encode())
        self.follower.stdin.flush()
        line = self.follower.stdout.readline()
        if not line:
            raise RuntimeError(f"the follower of KV ended with status {self.follower.wait()}")
        return p99(json.loads(line))


def p99(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[-1]


@contextmanager
def kv_stream(relays: RelayLab) -> Iterator[KvStream]:
    prefill, decode = relays.lab[_PREFILL], relays.lab[_DECODE]
    about = [secrets.token_hex(32), prefill.address, str(_PORT), str(BUFFER_BYTES)]
    with ExitStack() as closing:
        holder = prefill.spawn([sys.executable, str(_PROGRAM), "hold", *about], stdin=subprocess.PIPE)
        closing.callback(_end, holder)
        await_port(prefill, _PORT)
        command = [sys.executable, str(_PROGRAM), "follow", *about]
        follower = decode.spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        closing.callback(_end, follower)
        yield KvStream(follower)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.communicate(timeout=10)


@dataclass(slots=True)
class Relayed:
    """How much went beside: whole packs, and the part of the last."""

    num_packs: float = 0.0


@contextmanager
def relaying(relays: RelayLab, pack: RawPack, holder: str, follower: str) -> Iterator[Relayed]:
    """The same pack again and again, for as long as the block runs. Raises what the relays did."""
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
