"""The scheduler's view of the cluster, as the CLI and the demo read it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from torchrelay.cli.problems import Problem, Unreachable
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc


def watch(address: str) -> Iterator[scheduler_pb2.ClusterView]:
    """A full view at once, then one after every change. Raises ``Unreachable`` when the scheduler is away."""
    with grpc.insecure_channel(address) as channel:
        try:
            yield from scheduler_pb2_grpc.SchedulerStub(channel).WatchCluster(scheduler_pb2.WatchClusterRequest())
        except grpc.RpcError as error:
            raise _unreachable(address) from error


def explain(address: str, request_id: str = "", model: str = "") -> scheduler_pb2.ExplainReply:
    """The timeline of a request, or a model's recent decisions. Raises ``Problem``."""
    with grpc.insecure_channel(address) as channel:
        request = scheduler_pb2.ExplainRequest(request_id=request_id, model=model)
        try:
            return scheduler_pb2_grpc.SchedulerStub(channel).Explain(request, timeout=5)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.NOT_FOUND:
                raise Problem(error.details() or "nothing is known of it", "only recent requests are kept") from error
            raise _unreachable(address) from error


def _unreachable(address: str) -> Unreachable:
    return Unreachable(f"the scheduler at {address} does not answer", "is the platform up? torchrelay up")
