"""The limits of the public gRPC server."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.common.net.rpc.options import OPTIONS

_METADATA_BYTES, _LOOKAHEAD_BYTES = 8 << 10, 64 << 10


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Limits of the public gRPC server. ``PublicPort`` enforces those for which grpcio has no setting."""

    connections: int
    streams: int  # calls at once on one connection; further ones wait in the client
    message_bytes: int
    head_s: float  # for a connection's first frames
    idle_s: float  # after which a connection without a call is closed
    silence_s: float  # after which a connection whose client reads nothing is closed

    @property
    def options(self) -> list[tuple[str, int]]:
        """Options of grpcio: ``OPTIONS`` with these limits in place of equal keys; grpcio takes the first of a key."""
        limits = [
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.server_handshake_timeout_ms", int(self.head_s * 1000)),
            ("grpc.http2.settings_timeout", int(self.head_s * 1000)),
            ("grpc.max_connection_idle_ms", int(self.idle_s * 1000)),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES),
            # Bytes that a client may send before its message is read; bandwidth probes would raise them to megabytes.
            ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
            ("grpc.http2.bdp_probe", 0),
        ]
        return list((dict(OPTIONS) | dict(limits)).items())
