"""`torchrelay-health HOST:PORT`: gRPC health check of a service, used by the container images.

Uses the service's TLS settings, and falls back to plain text, which the public gRPC port speaks.
"""

from __future__ import annotations

import socket
import ssl
import sys
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchrelay.common.host.addresses import split_address
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import open_blocking_channel
from torchrelay.common.net.rpc.health import fault_in
from torchrelay.common.process.settings import ServiceSettings, load_settings

TIMEOUT_S = 2.0
USAGE = "usage: torchrelay-health HOST:PORT"


def fault_of(address: str, tls: Tls | None = None) -> str | None:
    """Why the service at ``address`` cannot serve, empty if it does; ``None`` without an answer."""
    with open_blocking_channel(address, tls) as channel:
        try:
            check = cast(Any, health_pb2_grpc.HealthStub(channel)).Check.with_call
            reply, call = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return None
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return fault_in(call.trailing_metadata()) or "it does not say why"


def accepts_connections(address: str) -> bool:
    try:
        with _connect(address):
            return True
    except (OSError, ValueError):
        return False


def speaks_tls(address: str) -> bool:
    """Whether the server at ``address`` begins a TLS handshake."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connect(address) as plain, context.wrap_socket(plain):
            return True
    except (OSError, ValueError):
        return False


def _connect(address: str) -> socket.socket:
    return socket.create_connection(split_address(address), TIMEOUT_S)


def main() -> None:
    """Entry point: status 0 when the service serves, 2 for a usage error, otherwise 1."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if len(sys.argv) != 2:
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    address = sys.argv[1]
    tls = load_settings(ServiceSettings, "torchrelay-health", args=[]).tls
    fault = fault_of(address, tls)
    if fault is None and tls is not None:
        fault = fault_of(address)
    if fault == "":
        print("serving")
    elif fault is not None:
        sys.exit(f"{address} answers but is not serving: {fault}")
    elif speaks_tls(address):
        files = "TORCHRELAY_TLS_CA_FILE, TORCHRELAY_TLS_CERT_FILE and TORCHRELAY_TLS_KEY_FILE"
        what = "rejects this certificate: name the cluster's files with" if tls else "expects TLS: set"
        sys.exit(f"{address} {what} {files}")
    elif accepts_connections(address):
        sys.exit(f"{address} takes connections and gives no gRPC answer; is it a REST port?")
    else:
        sys.exit(f"{address} does not answer")
