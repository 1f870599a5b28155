"""Hashes of token prefixes: equal only for equal beginnings of prompts of one tenant.

A *page* is the unit of an engine's prefix cache. Its hash covers the hash of the last routing block before it and all
tokens from there to its end, and so the whole prefix. A *routing block* is four pages; its hash is that of its last
page, so the scheduler, which remembers routing blocks, and the engines share one chain.

    page hashes      h1  h2  h3  h4  h5  ...     h1 = hash(hash(salt), page 1), h2 = hash(hash(salt), pages 1-2), ...
    routing hashes               h4              h5 = hash(h4, page 5), ...

The salt is the tenant: the time to first token of a prompt reveals nothing about another tenant's prompts. Prompts of
different adapters of a model have different salts, since their KV differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

HASH_BYTES: Final = 16
PAGE_TOKENS: Final = 16
ROUTING_PAGES: Final = 4
ROUTING_TOKENS: Final = ROUTING_PAGES * PAGE_TOKENS


def prefix_salt(tenant_id: str, adapter_id: str = "") -> str:
    """The salt of a tenant's prompts; ``adapter_id`` is empty for a model without an adapter."""
    return f"{tenant_id}/{adapter_id}" if adapter_id else tenant_id


def page_hashes(salt: str, token_ids: Sequence[int], page_tokens: int = PAGE_TOKENS) -> Iterator[bytes]:
    """Hashes of the full pages, from the first on."""
    from blake3 import blake3  # imported late: without a prefix cache the engine needs only torch

    key = blake3(salt.encode()).digest(HASH_BYTES)
    whole_tokens = len(token_ids) // page_tokens * page_tokens
    for begin in range(0, whole_tokens, page_tokens):
        if begin % (ROUTING_PAGES * page_tokens) == 0:
            block = blake3(key)
        block.update(_bytes_of(token_ids[begin : begin + page_tokens]))
        key = block.digest(HASH_BYTES)
        yield key


def routing_hashes(salt: str, token_ids: Sequence[int]) -> Iterator[bytes]:
    """Hashes of the full routing blocks: every fourth page hash."""
    from blake3 import blake3

    key = blake3(salt.encode()).digest(HASH_BYTES)
    for end in range(ROUTING_TOKENS, len(token_ids) + 1, ROUTING_TOKENS):
        key = blake3(key + _bytes_of(token_ids[end - ROUTING_TOKENS : end])).digest(HASH_BYTES)
        yield key


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()
