"""Byte streams between nodes: TCP with pacing, TLS, shared memory, and the choice among them by address."""
