"""The store's exported metrics, read when they are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from torchrelay.param_store.store import Store


def export_metrics(store: Store, meter: Meter | None = None) -> None:
    """Registers the instruments of a store."""
    meter = meter or metrics.get_meter("torchrelay.param_store")
    counts = store.arena_copies.counts

    def add(name: str, description: str, read: Callable[[], Mapping[str, int]], label: str, rises: bool = True) -> None:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for key, value in read().items():
                yield Observation(value, {label: key} if label else {})

        create = meter.create_observable_counter if rises else meter.create_observable_gauge
        create(f"torchrelay_param_store_{name}", [observe], description=description)

    add("bytes_received", "Bytes of verified chunks, by source.", lambda: counts.num_bytes_received, "source")
    damaged = "Received chunks that did not match their digests, by source."
    add("damaged_chunks", damaged, lambda: counts.num_damaged_chunks, "source")
    add("bytes_sent", "Bytes of chunks sent to followers.", lambda: {"": store.holder.bytes_sent}, "")
    add("streams", "Open streams to followers.", lambda: {"": store.holder.num_streams}, "", rises=False)
    add("packs", "Whole packs held, by tier.", lambda: _by_tier(store, len), "tier", rises=False)
    add("pack_bytes", "Bytes of whole packs held, by tier.", lambda: _by_tier(store, sum), "tier", rises=False)
    add("evictions", "Packs evicted for others, by tier.", lambda: _evictions(store), "tier")


def _by_tier(store: Store, total: Callable[[list[int]], int]) -> dict[str, int]:
    tiers = {"arena": total([slab.num_bytes for slab in store.arena.slabs() if slab.complete])}
    if store.disk is not None:
        tiers["disk"] = total([pack.num_bytes for pack in store.disk.packs()])
    return tiers


def _evictions(store: Store) -> dict[str, int]:
    tiers = {"arena": store.arena.num_evictions}
    return tiers if store.disk is None else {**tiers, "disk": store.disk.num_evictions}
