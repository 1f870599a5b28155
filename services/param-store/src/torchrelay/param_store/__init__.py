"""The parameters of one Torchrelay host: arena, disk, remote store, relaying, packing."""
