"""The commands, one per file: each reads its options, calls ``api`` and prints with ``views``."""
