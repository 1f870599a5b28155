"""Index of the prompt prefixes that instances probably have cached: those recently placed there for prefill.

Workers do not report their caches: the scheduler sees the hashes of every prompt and knows where it sent it. As in the
router of SGLang, the index is right as long as the worker's cache has the assumed size and evicts in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice


class PrefixIndex:
    """Block hashes by instance. A hash stands for the prompt up to the end of its block.

    The hashes are keys of a plain dict, from the least to the most recently noted: with thousands of blocks, an
    ``OrderedDict`` takes about three times as long to grow.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[bytes, None]] = {}  # by present instance
        # Instances by the first block of their prompts, the last noted last.
        self._beginning_with: dict[bytes, dict[str, None]] = {}

    def note(self, instance_id: str, block_hashes: Sequence[bytes], max_blocks: int) -> None:
        """Records a prompt that was placed on the instance; its KV pool holds ``max_blocks`` blocks."""
        if not block_hashes:
            return
        known = self._of.setdefault(instance_id, {})
        for block_hash in reversed(block_hashes):  # a prompt is evicted from its end
            known.pop(block_hash, None)
            known[block_hash] = None
        beginning = self._beginning_with.setdefault(block_hashes[0], {})
        beginning.pop(instance_id, None)
        beginning[instance_id] = None
        for block_hash in list(islice(known, max(len(known) - max_blocks, 0))):
            del known[block_hash]
            self._leave(instance_id, block_hash)

    def num_blocks(self, instance_id: str, block_hashes: Sequence[bytes]) -> int:
        """Number of leading blocks of the prompt that the instance probably has cached."""
        known = self._of.get(instance_id)
        if not known or not block_hashes or block_hashes[0] not in known:
            return 0
        low, high = 1, len(block_hashes)
        while low < high:  # all blocks before a known block were noted with it, as more recent
            middle = (low + high + 1) // 2
            if block_hashes[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def last_noted(self, block_hashes: Sequence[bytes], most: int) -> list[str]:
        """The instances that the beginning of the prompt was placed on last, at most this many."""
        beginning = self._beginning_with.get(block_hashes[0], {}) if block_hashes else {}
        return list(islice(reversed(beginning), most))

    def forget(self, instance_id: str) -> None:
        """Forgets an instance that is gone."""
        for block_hash in self._of.pop(instance_id, ()):
            self._leave(instance_id, block_hash)

    def _leave(self, instance_id: str, block_hash: bytes) -> None:
        """Removes an evicted block, if it is the first of a prompt."""
        if (beginning := self._beginning_with.get(block_hash)) is not None:
            beginning.pop(instance_id, None)
            if not beginning:
                del self._beginning_with[block_hash]
