"""The tenants' door of Torchrelay: REST, gRPC, keys, catalogue, ledger."""

import os

# Before gRPC is imported: uvloop forks for the template child, and gRPC's fork handlers, run in that child between fork
# and exec, crash it now and then.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
