"""The Torchrelay gateway: REST and gRPC for tenants, API keys, model catalog, ledger."""

import os

# Both before gRPC is imported. uvloop forks to start text processes; gRPC's fork handlers run in these children before
# exec and occasionally crash them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# gRPC's EventEngine reads sockets on its own threads: six context switches per incoming message. The older poller reads
# on the thread that waits for completions: two switches and half the CPU. The names cover clients and servers.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
