"""Byte streams between nodes: TCP with pacing, TLS, shared memory, and shared memory first within a host."""
