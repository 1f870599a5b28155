"""Tokens: loading tokenizers, incremental text, stop strings, prefix hashes. Imports errors only."""
