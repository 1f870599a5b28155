"""The tenants' door of Torchrelay: REST, gRPC, keys, catalog, ledger."""

import os

# Before gRPC is imported: uvloop forks for the template child, and gRPC's fork handlers, run in that child between fork
# and exec, crash it now and then.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# gRPC's newer engine reads sockets on threads of its own: a message that comes makes six switches of threads. The older
# one reads where completions are waited for: two switches, and half the CPU. Both names: its clients and its servers.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

# Prompts are encoded on threads of ours: those of tokenizers, one per core, would be two more switches for each.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
