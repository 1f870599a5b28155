"""The holder's side: HolderServer, one Downstream per follower. Imports protocol, transport, buffers, errors."""
