"""`torchrelay-health HOST:PORT`: asks a service for its gRPC health; the health check of the images.

With the TLS settings of the service it comes as a peer. The tenants' door speaks no TLS: there it asks again, plainly.
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
    """Whether the server at ``address`` says that it serves; ``None`` when nobody answers."""
    with open_blocking_channel(address, tls) as channel:
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
    tls = load_settings(ServiceSettings, "torchrelay-health", args=[]).tls
    serves = is_serving(address, tls)
    if serves is None and tls is not None:
        serves = is_serving(address)
    if serves:
        print("serving")
    else:
        sys.exit(f"{address} does not answer" if serves is None else f"{address} answers, and does not serve")
