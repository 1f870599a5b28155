"""Dispatch, autoscaling and relay planning of Torchrelay."""

import os

# gRPC's EventEngine reads sockets on threads of its own; the older poller reads on the thread that waits for
# completions: a beat or a gateway's message wakes one thread less. A thousand peers that report cost a sixth less CPU,
# placements a twentieth. It is read when grpc is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
