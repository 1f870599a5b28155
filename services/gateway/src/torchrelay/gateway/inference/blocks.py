"""Routing blocks: the hashes by which the scheduler knows which prompts begin alike."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from blake3 import blake3

HASH_BYTES = 16


def block_hashes(tenant_id: str, prompt: Sequence[int], block_tokens: int) -> list[bytes]:
    """One hash per whole block of ``block_tokens`` tokens, each over its block and the hash before it.

    The first hash is chained to the tenant, so that equal prompts of two tenants have nothing in common.
    """
    if block_tokens <= 0:
        return []
    hashes: list[bytes] = []
    before = blake3(tenant_id.encode()).digest()
    for begin in range(0, len(prompt) - block_tokens + 1, block_tokens):
        tokens = array("I", prompt[begin : begin + block_tokens])
        if sys.byteorder == "big":
            tokens.byteswap()
        before = blake3(before + tokens.tobytes()).digest()[:HASH_BYTES]
        hashes.append(before)
    return hashes
