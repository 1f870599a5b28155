"""Identities of processes, and the methods that each may call: keys, tokens, roles, certificates."""
