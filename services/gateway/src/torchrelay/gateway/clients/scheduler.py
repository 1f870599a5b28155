"""Client of the scheduler for the REST API: the cluster, explanations and events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc

from torchrelay.common.errors import InvalidRequest, TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import reports_pb2, scheduler_pb2
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.clients.endpoint import scheduler_endpoint
from torchrelay.gateway.core import ANY_ENGINE, OWN_ENGINE, ModelShape

KV_PAGE_TOKENS = 16  # the scheduler reserves KV in whole pages
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of the present workers."""

    largest_bytes: int = 0  # of weights that the largest known slot can hold; 0: none is known
    kinds: frozenset[tuple[str, frozenset[str]]] = frozenset()  # engine, labels of the host; empty: none is known
    largest_pool_bytes: int = 0  # of KV

    @property
    def engines(self) -> frozenset[str]:
        return frozenset(engine for engine, _ in self.kinds)

    def check_engine(self, engine: str) -> None:
        """Raises ``InvalidRequest`` if no worker has the engine that a model names, unless no worker is known."""
        if engine != ANY_ENGINE and self.engines and engine not in self.engines:
            offered = " and ".join(sorted(self.engines))
            raise InvalidRequest(f"no worker has the engine {engine}; the workers have {offered}", field="engine")

    def check_hosts(self, hosts: Iterable[str], engine: str = ANY_ENGINE, field: str = "hosts") -> None:
        """Raises ``InvalidRequest`` if no host with the engine has all the labels that a model requires, unless no
        worker is known. ``field``: what is set; a tenant, who may set the engine, does not read all hosts' labels.
        """
        wanted = frozenset(hosts)
        present = {labels for of_slot, labels in self.kinds if engine in (ANY_ENGINE, of_slot)}
        if wanted and self.kinds and not any(wanted <= labels for labels in present):
            offered = "; ".join(", ".join(sorted(labels)) for labels in sorted(present, key=sorted) if labels)
            which = "" if engine == ANY_ENGINE else f" with the engine {engine}"
            fix = f"; the hosts{which} have {offered or 'none'}: start workers there with --label, or set other labels"
            message = f"no host{which} has the labels {', '.join(sorted(wanted))}"
            raise InvalidRequest(message + (fix if field == "hosts" else ": set another engine"), field=field)

    def check_kv_share(self, share: float, shape: ModelShape) -> None:
        """Raises ``InvalidRequest`` if the share of the largest pool holds not even a page of the model's KV."""
        page_bytes = KV_PAGE_TOKENS * shape.kv_bytes_per_token
        pool_bytes = self.largest_pool_bytes
        if share < 1.0 and pool_bytes and int(share * pool_bytes) < page_bytes:
            least = math.ceil(100 * page_bytes / pool_bytes) / 100
            fix = f"set at least {least:g}" if least <= 1 else f"give the workers more than its {pool_bytes:,} bytes"
            raise InvalidRequest(
                f"a share of {share:g} of the largest KV pool holds not even {KV_PAGE_TOKENS} tokens of the model; "
                f"{fix}",
                field="kv_share",
            )


def _engine_of(worker: reports_pb2.WorkerReport) -> str:
    """The engine as a model names it: with the number of devices of the slot, if it has several."""
    engine = worker.capabilities.engine or OWN_ENGINE
    return f"{engine}:{worker.num_devices}" if worker.num_devices > 1 else engine


class SchedulerClient:
    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = SchedulerStub(channel)
        self._endpoint = scheduler_endpoint(address)

    async def slots(self, timeout_s: float = 2.0) -> Slots:
        """The slots of the present workers; none if the scheduler is unreachable."""
        view = await self.cluster(timeout_s)
        if view is None:
            return Slots()
        return Slots(
            view.largest_slot_bytes,
            frozenset((_engine_of(worker), frozenset(worker.labels)) for worker in view.workers),
            max((worker.kv_pool_bytes for worker in view.workers), default=0),
        )

    async def cluster(self, timeout_s: float = 2.0) -> scheduler_pb2.ClusterView | None:
        """The cluster now, of all tenants; None if the scheduler is unreachable."""
        try:
            return await self.view(timeout_s)
        except TorchrelayError as error:
            log.info("cluster_unknown", error=error.message)
            return None

    async def view(self, timeout_s: float = 2.0) -> scheduler_pb2.ClusterView:
        """The cluster now, of all tenants. Raises the scheduler's errors, or ``Unavailable``."""
        call = self._stub.WatchCluster(scheduler_pb2.WatchClusterRequest(), timeout=timeout_s)
        try:
            with self._endpoint.mapped_errors():
                async for view in call:
                    return view
        finally:
            call.cancel()
        raise self._endpoint.unreachable()  # it stops

    async def explain(
        self, *, request_id: str = "", model: str = "", timeout_s: float = 5.0
    ) -> scheduler_pb2.ExplainReply:
        """The explanation of a request or of a model.

        Raises the scheduler's errors (``NotFound`` for a request too old), or ``Unavailable``.
        """
        with self._endpoint.mapped_errors():
            explained = scheduler_pb2.ExplainRequest(request_id=request_id, model=model)
            return await self._stub.Explain(explained, timeout=timeout_s)

    async def events(
        self,
        kinds: Sequence[str],
        since_unix_us: int,
        max_events: int,
        after_sequence: int | None = None,
        timeout_s: float = 10.0,
    ) -> list[scheduler_pb2.Event]:
        """Events since a time, oldest first: the newest; with ``after_sequence`` those that follow it, 0 for the first.

        Raises the scheduler's errors (``InvalidRequest`` for an unknown kind), or ``Unavailable``.
        """
        request = scheduler_pb2.WatchEventsRequest(
            kinds=kinds, since_unix_us=since_unix_us, after_sequence=after_sequence or 0
        )
        call = self._stub.WatchEvents(request, timeout=timeout_s)
        kept: deque[scheduler_pb2.Event] = deque(maxlen=max_events)
        try:
            with self._endpoint.mapped_errors():
                async for event in call:
                    kept.append(event)
                    if after_sequence is not None and len(kept) == max_events:
                        break
        finally:
            call.cancel()
        return list(kept)
