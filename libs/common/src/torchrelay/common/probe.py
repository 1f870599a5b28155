"""`torchrelay-health HOST:PORT`: asks a service for its gRPC health; the health check of the images."""

from __future__ import annotations

import sys
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 2.0


def is_serving(address: str) -> bool:
    """Whether the server at ``address`` answers and says that it serves."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = cast(Any, health_pb2_grpc.HealthStub(channel)).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> None:
    """Entry point: status 0 when the service serves, 1 when it does not, 2 for a wrong call."""
    if len(sys.argv) != 2:
        sys.exit("usage: torchrelay-health HOST:PORT")
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
