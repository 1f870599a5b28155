"""`torchrelay-health HOST:PORT`: asks a service for its gRPC health; the health check of the images."""

from __future__ import annotations

import sys
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 2.0
USAGE = "usage: torchrelay-health HOST:PORT"


def is_serving(address: str) -> bool | None:
    """Whether the server at ``address`` says that it serves; ``None`` when nobody answers."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = cast(Any, health_pb2_grpc.HealthStub(channel)).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError:
            return None
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> None:
    """Entry point: status 0 when the service serves, 1 when it does not or for a wrong call."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if len(sys.argv) != 2:
        sys.exit(USAGE)
    address = sys.argv[1]
    serves = is_serving(address)
    if serves:
        print("serving")
    else:
        sys.exit(f"{address} does not answer" if serves is None else f"{address} answers, and does not serve")
