"""The data plane of Torchrelay: packs, arenas, follow, tickets, transports."""
