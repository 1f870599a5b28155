"""Operations of the tests on a cluster, from its control host: publish, call, watch, move packs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from tests.lab.cluster import TARGETS, Cluster
from tests.support.callers import every_token
from tests.support.http import http
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_source import Folder
from torchrelay.cli.api.upload import ModelUpload
from torchrelay.common.identity.callers import SCHEDULER_NODE
from torchrelay.common.net.rpc.channels import with_token
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import param_store_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from torchrelay.control.v1.reports_pb2 import PackCopy, SlotState
from torchrelay.control.v1.scheduler_pb2 import ClusterView
from torchrelay.transfer.protocol.tickets import TicketIssuer

_WAIT_S = 90.0
_REMOTE = "remote"
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Published:
    """A model and the pack it is made of."""

    name: str
    pack_id: str
    pack_bytes: int


class Operator:
    """Calls of a tenant and an operator.

    HTTP calls run on the calling thread, moved to the control host meanwhile; gRPC calls go through the Unix proxy.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._tickets = cluster, TicketIssuer(cluster.cluster_key)
        with cluster.control.inside(), GatewayClient(cluster.http, cluster.admin_key) as admin:
            admin.call("POST", "/v1/tenants", json={"name": "acme"})
            self.key: str = admin.call("POST", "/v1/keys", json={"tenant": "acme", "name": "lab"})["key"]

    def publish(self, folder: Path, name: str = "", **settings: str) -> Published:
        """Uploads a checkpoint through the gateway; its pack is then in the remote store of ``source``."""
        with self._cluster.control.inside(), GatewayClient(self._cluster.http, self.key) as client:
            model = ModelUpload(client, Folder(folder), name or folder.name, lambda *_: None).run(settings)
        with self._store("source") as store:
            version = store.Describe(pb.DescribeRequest(version_id=model["version"]), timeout=_WAIT_S).version
        return Published(model["id"], version.pack_id, version.pack_bytes)

    def complete(self, model: str, prompt: list[int], num_tokens: int) -> list[int]:
        """The ids of a greedy continuation."""
        body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        options = {"return_token_ids": True, "ignore_eos": True}
        with self._cluster.control.inside():
            response = http.post(
                f"{self._cluster.http}/v1/completions",
                json={**body, **options},
                headers={"Authorization": f"Bearer {self.key}"},
                timeout=_WAIT_S,
            )
        assert response.status_code == 200, response.text
        token_ids: list[int] = response.json()["choices"][0]["token_ids"]
        return token_ids

    @contextmanager
    def burst(
        self, num_requests: int, model: str, prompt: list[int], num_tokens: int
    ) -> Iterator[Sequence[Future[list[int]]]]:
        """Runs so many equal requests during the block."""
        with ThreadPoolExecutor(num_requests) as pool:
            yield [pool.submit(self.complete, model, prompt, num_tokens) for _ in range(num_requests)]

    def until(self, find: Callable[[ClusterView], Found | None]) -> Found:
        """The first result of ``find`` over the views of the cluster."""
        token = every_token(self._cluster.cluster_key, SCHEDULER_NODE)
        with grpc.insecure_channel(self._cluster.scheduler_target) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(with_token(channel, token))
            view = ClusterView()
            try:
                for view in stub.WatchCluster(scheduler_pb2.WatchClusterRequest(), timeout=_WAIT_S):
                    if (result := find(view)) is not None:
                        return result
            except grpc.RpcError as error:
                raise AssertionError(f"not seen within {_WAIT_S:g} s ({error}); the last view:\n{view}") from error
        raise AssertionError("the scheduler ended its view")

    def set_minimum(self, model: str, num_instances: int) -> None:
        """How many instances the model has at least, per role."""
        with self._cluster.control.inside(), GatewayClient(self._cluster.http, self._cluster.admin_key) as admin:
            admin.call("PATCH", f"/v1/models/{model}", json={"min_instances": num_instances})

    def await_zero(self) -> None:
        """Waits until no worker holds a model and no pack is pinned."""
        self.until(lambda view: None if view.instances or _num_pins(view) else view)

    def keep_copies_on(self, hosts: Sequence[str], pack_id: str) -> None:
        """Places the pack in the arenas of exactly these hosts.

        ``source`` takes it from its remote store, the others from ``source``.
        """
        holders = set(self.until(lambda view: whole_copies(view, pack_id)))
        for host in sorted(holders - set(hosts)):
            self._drop(host, pack_id)
        for host in hosts:
            if host not in holders:
                self._fill(host, pack_id)
        self.until(lambda view: True if whole_copies(view, pack_id).keys() == set(hosts) else None)

    def _fill(self, host: str, pack_id: str) -> None:
        source = types_pb2.Source(holder_id=_REMOTE)
        if host != "source":
            address = self.until(lambda view: _data_address(view, "source"))
            expires_unix_ms = int((time.time() + _WAIT_S) * 1000)
            ticket = self._tickets.issue(pack_id, "store-source", f"store-{host}", expires_unix_ms)
            source = types_pb2.Source(holder_id="store-source", data_address=address, ticket=ticket)
        epoch = self.until(lambda view: view.epoch)
        request = pb.RelayRequest(epoch=epoch, pack_id=pack_id, sources=[source], relay_id="by hand")
        with self._store(host) as store:
            store.Relay(request, timeout=_WAIT_S)
        self.until(lambda view: True if host in whole_copies(view, pack_id) else None)

    def _drop(self, host: str, pack_id: str) -> None:
        """Retries, since an ending stream may still pin the copy."""
        with self._store(host) as store:
            self.until(
                lambda view: (
                    store.Drop(pb.DropRequest(epoch=view.epoch, pack_id=pack_id), timeout=_WAIT_S).dropped or None
                )
            )

    def place_of(self, host: str, pack_id: str) -> pb.HoldReply:
        """The pack's place in a host's arena."""
        with self._store(host) as store:
            hold = store.Hold(pb.HoldRequest(pack_id=pack_id, owner_id="a test"), timeout=_WAIT_S)
            place = next(hold)
            hold.cancel()
        self.await_zero()  # its pin is gone
        return place

    @contextmanager
    def _store(self, host: str) -> Iterator[param_store_pb2_grpc.ParamStoreStub]:
        token = every_token(self._cluster.cluster_key, f"store-{host}")
        with grpc.insecure_channel(self._cluster.store_target(host)) as channel:
            yield param_store_pb2_grpc.ParamStoreStub(with_token(channel, token))


def _num_pins(view: ClusterView) -> int:
    return sum(copy.num_pins for store in view.stores for copy in store.copies)


def _data_address(view: ClusterView, host: str) -> str | None:
    return next((store.data_address for store in view.stores if store.host_id == host), None)


def copies_of(view: ClusterView, host: str) -> dict[str, PackCopy]:
    """The packs in a host's arena."""
    return {copy.pack_id: copy for store in view.stores if store.host_id == host for copy in store.copies}


def whole_copies(view: ClusterView, pack_id: str) -> dict[str, PackCopy]:
    """The complete copies of a pack, by host."""
    copies = {store.host_id: copies_of(view, store.host_id).get(pack_id) for store in view.stores}
    return {host: copy for host, copy in copies.items() if copy and 0 < copy.num_chunks == copy.num_chunks_verified}


def copies_once_served_everywhere(view: ClusterView, pack_id: str) -> dict[str, PackCopy] | None:
    """The targets' copies of a pack once all their workers have all of it loaded; None before."""
    ready = {
        worker.host_id
        for worker in view.workers
        if worker.slot.pack_id == pack_id and worker.slot.state == SlotState.STATE_READY
    }
    whole = whole_copies(view, pack_id)
    if ready >= set(TARGETS) <= whole.keys() and all(whole[host].relay_end_unix_us for host in TARGETS):
        return {host: whole[host] for host in TARGETS}
    return None
