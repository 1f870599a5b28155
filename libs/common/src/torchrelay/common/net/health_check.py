"""`torchrelay-health HOST:PORT`: gRPC health check of a service, used by the container images.

Uses the service's TLS settings, and falls back to plain text, which the public gRPC port speaks.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchrelay.common.net.rpc import open_blocking_channel
from torchrelay.common.process.settings import ServiceSettings, load_settings
from torchrelay.common.tls import Tls

TIMEOUT_S = 2.0
USAGE = "usage: torchrelay-health HOST:PORT"


def is_serving(address: str, tls: Tls | None = None) -> bool | None:
    """Whether the server at ``address`` reports that it serves; ``None`` without an answer."""
    with open_blocking_channel(address, tls) as channel:
        try:
            reply = cast(Any, health_pb2_grpc.HealthStub(channel)).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError:
            return None
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> None:
    """Entry point: status 0 when the service serves, else 1."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if len(sys.argv) != 2:
        sys.exit(USAGE)
    address = sys.argv[1]
    tls = load_settings(ServiceSettings, "torchrelay-health", args=[]).tls
    serves = is_serving(address, tls)
    if serves is None and tls is not None:
        serves = is_serving(address)
    if serves:
        print("serving")
    else:
        sys.exit(f"{address} does not answer" if serves is None else f"{address} answers but is not serving")
