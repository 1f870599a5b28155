"""The lab of the relay's figures: a source, seven hosts and common operations."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import progress
from tests.lab import Host, Lab, LabError
from tests.lab.raw_pack import RawPack, publish
from tests.lab.stores import Stores
from torchrelay.control.v1.reports_pb2 import PackCopy
from torchrelay.transfer.arena.mapped_slab import MappedSlab

SOURCE = "source"
TARGETS = tuple(f"h{index}" for index in range(1, 8))
RATE_MBIT = 400
MB = 10**6
_ARENA_BYTES = 160 << 20
_POLL_S = 0.002
_HALF_S = 30.0
_IPERF_PORT = 5201


@dataclass(frozen=True, slots=True)
class Filled:
    """The outcome of a relay; times in seconds."""

    copies: Mapping[str, PackCopy]
    begin_unix_us: int

    @property
    def took_s(self) -> float:
        return max(copy.relay_end_unix_us - self.begin_unix_us for copy in self.copies.values()) / 1e6

    @property
    def num_repairs(self) -> int:
        return sum(copy.num_repairs for copy in self.copies.values())


@dataclass(slots=True)
class RelayLab:
    """Stores on shaped hosts; packs are in the source's arena, the other arenas are empty between cases."""

    lab: Lab
    stores: Stores
    _iperf3_bytes_per_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def pack(self, megabytes: int, embedding_share: float = 0.0) -> RawPack:
        """Adds a pack of 24 equal layers to the source's arena; ``forget`` it when done."""
        pack = publish(self.stores.remote, megabytes * MB, embedding_share=embedding_share, seed=time.monotonic_ns())
        self.stores.fill(SOURCE, pack)
        return pack

    def forget(self, pack: RawPack) -> None:
        self.stores.drop([SOURCE], pack)
        pack.path.unlink()

    def chain(self, pack: RawPack, during: Callable[[], None] | None = None, spared: Sequence[str] = ()) -> Filled:
        """Fills all targets, each from the target before it, and calls ``during``. ``spared`` are not awaited."""
        self.begin([self.stores.relay(target, pack, chain_sources(target)) for target in TARGETS])
        if during is not None:
            during()
        return self.await_filled([target for target in TARGETS if target not in spared], pack)

    def begin(self, calls: Sequence[Any]) -> None:
        """Waits until all these relays run. Raises ``RuntimeError`` if a target already had the pack."""
        if any([call.result().already_complete for call in calls]):
            raise RuntimeError("a target had the pack before its relay began")

    def renew(self) -> None:
        """Restarts the stores on all targets after a failure."""
        self.stores.restart(*TARGETS, keep_arena=False)

    def await_filled(self, targets: Sequence[str], pack: RawPack) -> Filled:
        # The last targets first, because a watched store sends reports.
        copies = self.stores.await_whole(targets[::-1], pack)
        return Filled(copies, min(copy.relay_begin_unix_us for copy in copies.values()))

    def fill_one(self, target: str, pack: RawPack, sources: Sequence[str], num_striped: int = 1) -> Filled:
        """Fills one target and empties it again."""
        self.begin([self.stores.relay(target, pack, sources, num_striped)])
        filled = self.await_filled([target], pack)
        self.stores.drop([target], pack)
        return filled

    def await_half(self, target: str, pack: RawPack) -> None:
        """Waits until half of the pack has arrived at the target, as its workers see it."""
        with self.stores.held(target, pack) as hold:
            place = next(hold)
        slab = MappedSlab(place.arena_path, place.slab_offset, place.slab_bytes)
        deadline = time.monotonic() + _HALF_S
        while slab.num_verified < slab.num_chunks // 2:
            if time.monotonic() > deadline:
                raise TimeoutError(f"half a pack did not reach {target} in {_HALF_S:g} s")
            time.sleep(_POLL_S)
        slab.close()

    def iperf3_bytes_per_s(self, source: str, target: str, seconds: float = 1.5) -> float:
        """Rate of an iperf3 TCP connection between two hosts, measured once."""
        key = (source, target)
        if key not in self._iperf3_bytes_per_s:
            self._iperf3_bytes_per_s[key] = iperf3_bytes_per_s(self.lab[source], self.lab[target], seconds)
        return self._iperf3_bytes_per_s[key]


def chain_sources(target: str) -> list[str]:
    """The holder before the target, then alternates for repair: earlier holders, then later ones."""
    place = TARGETS.index(target)
    return [*reversed([SOURCE, *TARGETS[:place]]), *TARGETS[place + 1 :]]


def iperf3_bytes_per_s(source: Host, target: Host, seconds: float) -> float:
    """Payload bytes per second that arrive over a TCP connection."""
    if shutil.which("iperf3") is None:
        raise LabError("iperf3, which measures the limits, is not on PATH: apt-get install iperf3")
    server = target.spawn(
        ["iperf3", "-s", "-1", "-B", target.address, "-p", str(_IPERF_PORT)], stdout=subprocess.DEVNULL
    )
    await_port(target, _IPERF_PORT)
    command = ["iperf3", "-c", target.address, "-p", str(_IPERF_PORT), "-t", f"{seconds:g}", "-J"]
    result = json.loads(source.run(command).stdout)
    server.wait(10)
    return float(result["end"]["sum_received"]["bits_per_second"]) / 8


def await_port(host: Host, port: int) -> None:
    """Waits for a listener without connecting, because iperf3 would take a connection for its client."""
    listening = f":{port}"
    deadline = time.monotonic() + 10
    while listening not in host.run(["ss", "-ltnH"]).stdout:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no process listens on port {port} of {host.name} after 10 s")


@contextmanager
def relay_lab() -> Iterator[RelayLab]:
    """Runs a store on each of eight hosts with links of 400 Mbit/s in each direction, and NATS on another host."""
    progress(f"starting {1 + len(TARGETS)} stores on links of {RATE_MBIT} Mbit/s")
    names = (SOURCE, *TARGETS)
    with (
        tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder,
        Lab(["control", *names], rate_mbit=RATE_MBIT) as lab,
        Stores(lab, Path(folder), {name: lab[name] for name in names}, _ARENA_BYTES) as stores,
    ):
        yield RelayLab(lab, stores)
