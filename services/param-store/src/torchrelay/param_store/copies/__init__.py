"""Copies of packs in the arena: downloads from peers and the remote store, holds, recovery."""
