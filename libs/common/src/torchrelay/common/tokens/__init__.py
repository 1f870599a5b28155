"""Tokens: tokenizers, incremental text, stop strings, prefix hashes."""
