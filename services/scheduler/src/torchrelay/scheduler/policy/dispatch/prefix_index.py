"""Which beginnings of prompts an instance is thought to have the KV of: what was placed there for prefill, lately.

Nothing is reported for this: the scheduler sees the hashes of every prompt, and knows where it sent it. Like the router
of SGLang, it is right as long as the worker's cache is as large as it is thought to be, and forgets like it does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MAX_INSTANCES = 1024


class PrefixIndex:
    """Block hashes by instance, the longest unused go first. A hash stands for all of the prompt up to its block."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()

    def note(self, instance_id: str, block_hashes: Sequence[bytes], max_blocks: int) -> None:
        """A prompt is sent there; its KV pool has room for ``max_blocks`` blocks."""
        if not block_hashes:
            return
        known = self._of.setdefault(instance_id, OrderedDict())
        self._of.move_to_end(instance_id)
        if len(self._of) > _MAX_INSTANCES:
            self._of.popitem(last=False)
        for block_hash in reversed(block_hashes):  # of a prompt the end goes first
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > max_blocks:
            known.popitem(last=False)

    def num_blocks(self, instance_id: str, block_hashes: Sequence[bytes]) -> int:
        """Whole blocks of the prompt, from its beginning on, that are there."""
        known = self._of.get(instance_id)
        if not known:
            return 0
        return next((n for n, block_hash in enumerate(block_hashes) if block_hash not in known), len(block_hashes))

    def forget(self, instance_id: str) -> None:
        """The instance is gone."""
        self._of.pop(instance_id, None)
