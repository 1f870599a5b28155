"""gRPC options of channels and servers, and the limits of a public server."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGE_BYTES = 8 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]

_METADATA_BYTES, _LOOKAHEAD_BYTES = 8 << 10, 64 << 10


@dataclass(frozen=True, slots=True)
class PublicLimits:
    """Limits of a server that unauthenticated clients reach. ``PublicPort`` adds those without a setting in grpcio."""

    connections: int
    streams: int  # concurrent calls on one connection; the client delays further calls
    message_bytes: int
    head_s: float  # for a connection's first frames
    idle_s: float  # a connection without a call is closed
    silence_s: float  # a connection that takes nothing of what is sent is closed

    @property
    def options(self) -> list[tuple[str, int]]:
        """These limits, and the ``OPTIONS`` that they do not replace: grpcio takes the first of two values of a key."""
        limits = [
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.server_handshake_timeout_ms", int(self.head_s * 1000)),
            ("grpc.http2.settings_timeout", int(self.head_s * 1000)),
            ("grpc.max_connection_idle_ms", int(self.idle_s * 1000)),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES),
            # What a client may send before its message is asked for. Probing for bandwidth would raise it to megabytes.
            ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
            ("grpc.http2.bdp_probe", 0),
        ]
        return list((dict(OPTIONS) | dict(limits)).items())
