"""Keys of token prefixes: equal for equal beginnings of the prompts of one tenant, and for nothing else.

There is one chain. A *page* is what an engine's prefix cache holds the KV of. Its key is the hash of the key of the
last routing block before it and of all tokens from there to its end, so it stands for everything from the first token
on. A *routing block* is four pages, and its key is that of its last page: what the scheduler remembers of where prompts
went is what an engine there finds their pages by.

    page keys      k1  k2  k3  k4  k5  ...       k1 = hash(salt's, page 1), k2 = hash(salt's, pages 1-2), ...
    routing keys               k4                k5 = hash(k4, page 5), ...

They are salted by tenant: nobody learns from a prompt's time to first token what another tenant has asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

HASH_BYTES: Final = 16
PAGE_TOKENS: Final = 16
ROUTING_PAGES: Final = 4
ROUTING_TOKENS: Final = ROUTING_PAGES * PAGE_TOKENS


def page_hashes(salt: str, token_ids: Sequence[int], page_tokens: int = PAGE_TOKENS) -> Iterator[bytes]:
    """One key per full page, from the first on."""
    from blake3 import blake3  # late: without a prefix cache the engine needs nothing but torch

    key = blake3(salt.encode()).digest(HASH_BYTES)
    whole_tokens = len(token_ids) // page_tokens * page_tokens
    for begin in range(0, whole_tokens, page_tokens):
        if begin % (ROUTING_PAGES * page_tokens) == 0:
            block = blake3(key)
        block.update(_bytes_of(token_ids[begin : begin + page_tokens]))
        key = block.digest(HASH_BYTES)
        yield key


def routing_hashes(salt: str, token_ids: Sequence[int]) -> Iterator[bytes]:
    """One key per full routing block, from the first on: every fourth of the page keys, without the ones between."""
    from blake3 import blake3

    key = blake3(salt.encode()).digest(HASH_BYTES)
    for end in range(ROUTING_TOKENS, len(token_ids) + 1, ROUTING_TOKENS):
        key = blake3(key + _bytes_of(token_ids[end - ROUTING_TOKENS : end])).digest(HASH_BYTES)
        yield key


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()
