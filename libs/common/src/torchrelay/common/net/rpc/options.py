"""gRPC options of channels and servers."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 8 << 20
# In the initial metadata of PutFile once the store has accepted what the client is about to send.
ACCEPTED = ("torchrelay-accepted", "1")
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),  # a proxy of the environment is for the outside, not for the cluster's own calls
]
