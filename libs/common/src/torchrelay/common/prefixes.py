"""Keys of token prefixes: equal for equal beginnings of the prompts of one tenant, and for nothing else.

The key of a block is the hash of the key before it and of its own tokens, so it stands for everything from the first
token on. By them a worker finds cached KV. They are salted by tenant: nobody learns from a prompt's time to first token
what another tenant has asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

KEY_BYTES = 16


def prefix_keys(salt: str, token_ids: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """One key per full block, from the first on."""
    from blake3 import blake3  # late: without a prefix cache the engine needs nothing but torch

    key = blake3(salt.encode()).digest(KEY_BYTES)
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        key = blake3(key + array("q", token_ids[end - block_tokens : end]).tobytes()).digest(KEY_BYTES)
        yield key
