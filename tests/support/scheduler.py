"""The scheduler's view of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import open_blocking_channel
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc


def watch(address: str, tls: Tls | None = None, token: str = "") -> Iterator[scheduler_pb2.ClusterView]:
    """A full view at once, then one after every change. Raises ``grpc.RpcError``."""
    with open_blocking_channel(address, tls, token, Caller.SCHEDULER) as channel:
        yield from scheduler_pb2_grpc.SchedulerStub(channel).WatchCluster(scheduler_pb2.WatchClusterRequest())
