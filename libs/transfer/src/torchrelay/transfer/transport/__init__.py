"""Byte streams between nodes: TCP with pacing, and TLS."""
