"""The public gRPC server, without TLS. It trusts its network as the REST server does."""

from __future__ import annotations

from torchrelay.common.net.rpc.health import Faults
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.gateway.settings import GatewaySettings

_MESSAGE_BYTES, _METADATA_BYTES, _LOOKAHEAD_BYTES = 1 << 20, 8 << 10, 64 << 10
_STREAMS = 256  # calls at once on a connection; further calls wait in the client


def public_grpc_server(settings: GatewaySettings, fault: Faults) -> RpcServer:
    """A server for any client. ``fault`` is called at each health check; it returns why the service cannot serve."""
    options = {
        "grpc.max_concurrent_streams": _STREAMS,
        "grpc.max_receive_message_length": min(_MESSAGE_BYTES, settings.max_body_bytes),
        "grpc.max_connection_idle_ms": settings.idle_connection_s * 1000,
        "grpc.max_metadata_size": _METADATA_BYTES,
        "grpc.absolute_max_metadata_size": 2 * _METADATA_BYTES,
        # Bytes that a client may send before its message is read; bandwidth probes would raise them to megabytes.
        "grpc.http2.lookahead_bytes": _LOOKAHEAD_BYTES,
        "grpc.http2.bdp_probe": 0,
    }
    return RpcServer(settings.host, settings.grpc_port, fault=fault, options=options, is_public=True)
