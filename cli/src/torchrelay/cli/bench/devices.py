"""Devices that a model holds while a load runs, and the tokens that they compute, from views of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.polling import cluster_view
from torchrelay.cli.errors import CliError, Unreachable

if TYPE_CHECKING:
    from torchrelay.control.v1.scheduler_pb2 import ClusterView

SAMPLE_S: Final = 0.5
ZERO_S: Final = 900.0  # a model that is called now and then may be kept for minutes


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """The devices of a version at a time, and the positions that each worker has computed since it began."""

    at_s: float
    num_devices: int
    num_computed: dict[str, int]  # by incarnation of the worker
    holders: frozenset[str]  # incarnations that hold the version


def sample_of(view: ClusterView, version: str, at_s: float) -> DeviceSample:
    workers = [worker for worker in view.workers if worker.slot.instance_id and worker.slot.version_id == version]
    return DeviceSample(
        at_s,
        sum(worker.num_devices or 1 for worker in workers),
        {each.incarnation: each.num_positions_prefilled + each.num_positions_decoded for each in view.workers},
        frozenset(worker.incarnation for worker in workers),
    )


def device_seconds(samples: Sequence[DeviceSample], end_s: float) -> float:
    """Devices times seconds until ``end_s``; between two samples the mean of both."""
    return sum(
        max(min(later.at_s, end_s) - earlier.at_s, 0.0) * (earlier.num_devices + later.num_devices) / 2
        for earlier, later in pairwise(samples)
    )


def computed_tokens(samples: Sequence[DeviceSample]) -> int:
    """Positions computed by workers while they held the version, for whomever. A view may lack a worker for a time, as
    after the scheduler has begun again.
    """
    last_known = dict(samples[0].num_computed) if samples else {}
    total = 0
    for earlier, later in pairwise(samples):
        total += sum(
            number - last_known.get(worker, 0)
            for worker, number in later.num_computed.items()
            if worker in earlier.holders | later.holders
        )
        last_known |= later.num_computed
    return total


@dataclass(slots=True)
class DeviceWatch:
    """Samples the cluster with the admin key; ``now_s`` gives the time of the load."""

    client: GatewayClient
    version: str
    now_s: Callable[[], float]
    samples: list[DeviceSample] = field(default_factory=list)

    def sample(self) -> DeviceSample:
        """Raises ``CliError``."""
        taken = sample_of(cluster_view(self.client), self.version, self.now_s())
        self.samples.append(taken)
        return taken

    async def run(self) -> None:
        """Samples until it is cancelled; a gateway or scheduler that restarts leaves a gap."""
        while True:
            with suppress(Unreachable):
                await asyncio.to_thread(self.sample)
            await asyncio.sleep(SAMPLE_S)

    async def zero(self) -> None:
        """Until no device holds the version. Raises ``CliError`` if that takes too long."""
        end_s = self.now_s() + ZERO_S
        while (await asyncio.to_thread(self.sample)).num_devices:
            if self.now_s() > end_s:
                hint = "do others call it? else: torchrelay models set NAME --idle-timeout-s 30"
                raise CliError(f"the model did not go to zero within {ZERO_S / 60:.0f} minutes", hint)
            await asyncio.sleep(SAMPLE_S / 2)
