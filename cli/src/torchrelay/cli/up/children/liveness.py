"""Whether a child lives: it must answer a probe, not merely exist."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.probes import GrpcProbe, HttpProbe, NatsProbe, Probe, RedisProbe
from torchrelay.common.net.rpc.channels import open_channel

LOOK_EVERY_S = 0.5
MAX_MISSED = 10  # looks: a child that needs five seconds for an answer on a busy machine still lives
SILENT = "did not answer"


def probe_of(broker_url: str, addresses: Mapping[str, str], tls: Tls | None) -> Probe | None:
    """The probe for a broker at ``broker_url``, or for a service with these addresses; None: it has none."""
    if broker_url:
        return NatsProbe(broker_url) if broker_url.startswith("nats:") else RedisProbe(broker_url)
    if url := addresses.get("http"):
        return HttpProbe(f"{url}/health")
    if address := addresses.get("grpc"):
        return GrpcProbe(open_channel(address, tls))
    return None


async def await_fault(
    probe: Probe, is_leaving: Callable[[], bool], look_every_s: float = LOOK_EVERY_S, max_missed: int = MAX_MISSED
) -> str:
    """Returns what is wrong with a child once it was so in ``max_missed`` looks in a row; one answer is enough to live.

    A child that ``is_leaving`` answers no more, and is not hung. Looks are counted, not seconds: when `up` itself was
    stopped or starved, it has missed one look, however long that took.
    """
    asking: asyncio.Task[str] | None = None
    num_missed, fault = 0, ""
    try:
        while num_missed < max_missed:
            asking = asking or asyncio.create_task(probe.ask())
            await asyncio.sleep(look_every_s)
            if asking.done():
                fault, asking = asking.result(), None
            else:
                fault = SILENT
            num_missed = num_missed + 1 if fault and not is_leaving() else 0
    finally:
        if asking is not None:
            asking.cancel()
            await asyncio.wait({asking})
        await probe.close()
    return f"{fault} for {max_missed * look_every_s:g} s"
