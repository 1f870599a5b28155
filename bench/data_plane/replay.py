"""Replays some of the planner's networks in the lab: measured relative to predicted time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.data_plane.figures import FigureTable
from bench.data_plane.lab import MB, RATE_MBIT, SOURCE, TARGETS, RelayLab
from bench.planning.networks import Network, replay_networks
from bench.planning.outcome import feeds_of, planned, simulate
from bench.report import progress
from tests.lab.raw_pack import RawPack
from tests.lab.stores import REMOTE
from torchrelay.scheduler.policy.relay.planning import TransferEdge

_PAYLOAD = 0.957  # payload share of a link at an MTU of 1500: planner and simulation count payload only


def measure_replays(relays: RelayLab, table: FigureTable, megabytes: int) -> None:
    """Maps each network onto the lab's hosts and shapes their links to match."""
    pack, rows = relays.pack(megabytes), []
    for network in replay_networks():
        payload = replace(network, hosts=tuple(
            replace(host, capacity_out=host.capacity_out * _PAYLOAD, capacity_in=host.capacity_in * _PAYLOAD)
            for host in network.hosts
        ))  # fmt: skip
        edges = planned(payload, pack.num_bytes)
        predicted_s = max(edge.ready_s for edge in edges)
        simulated_s = simulate(payload, feeds_of(edges), pack.num_bytes).makespan_s
        places = dict(zip((host.name for host in network.hosts), (SOURCE, *TARGETS), strict=False))
        measured_s = _replay(relays, network, edges, places, pack)
        rows.append(f"{measured_s:.2f}/{simulated_s:.2f}")
        progress(
            f"network {network.seed}, {len(network.sources)} of {len(network.hosts)} hosts are sources: measured "
            f"{measured_s:.2f} s, simulated {simulated_s:.2f} s, planned {predicted_s:.2f} s; {feeds_of(edges)}"
        )
        table.note("replayed_over_predicted", measured_s / simulated_s, f"measured/predicted s: {' '.join(rows)}")
    relays.forget(pack)


def _replay(
    relays: RelayLab, network: Network, edges: Sequence[TransferEdge], places: Mapping[str, str], pack: RawPack
) -> float:
    """Seconds until the last target is full."""
    for source in network.sources[1:]:
        relays.begin([relays.stores.relay(places[source.name], pack, [SOURCE])])
        relays.await_filled([places[source.name]], pack)
    try:
        for host in network.hosts:
            out_mbit, in_mbit = host.residual_out * 8 / MB, host.residual_in * 8 / MB
            relays.lab[places[host.name]].set_rate(outgoing_mbit=out_mbit, incoming_mbit=in_mbit)
        calls = []
        for edge in edges:
            sources = [places[source] for source in edge.sources if source != REMOTE]
            calls.append(relays.stores.relay(places[edge.target], pack, sources, edge.num_striped))
        relays.begin(calls)
        took_s = relays.await_filled([places[edge.target] for edge in edges], pack).took_s
    finally:
        for place in places.values():
            relays.lab[place].set_rate(outgoing_mbit=RATE_MBIT, incoming_mbit=RATE_MBIT)
    relays.stores.drop([place for place in places.values() if place != SOURCE], pack)
    return took_s
