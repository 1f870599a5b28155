"""Wire layouts of one model: for KV that is handed over, and for prompts that are exported."""

from __future__ import annotations

from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.core import GroupSpec
from torchrelay.engine.kv.layout import KvLayout, KvShape
from torchrelay.engine.kv.prefill_layout import PrefillLayout


class ModelLayouts:
    """``block_tokens`` is the block size of what leaves here; what arrives may have another."""

    def __init__(self, shape: KvShape, hidden_size: int, block_tokens: int) -> None:
        self._shape, self._hidden_size, self._block_tokens = shape, hidden_size, block_tokens

    def kv(self, group: GroupSpec) -> KvLayout:
        return KvLayout.of(self._shape, self._block_tokens, group)

    def prefill(self, group: GroupSpec, boundary: int, with_kv: bool, block_tokens: int | None = None) -> PrefillLayout:
        size = block_tokens or self._block_tokens
        return PrefillLayout.of(self._shape, self._hidden_size, boundary, with_kv, size, group)

    def check_kv(self, group: GroupSpec, offered: KvLayout) -> None:
        """Raises ``InvalidRequest``."""
        if offered.block_tokens < 1 or offered != KvLayout.of(self._shape, offered.block_tokens, group):
            raise InvalidRequest(f"the KV offered for {group.group_id} does not match the model and the request")

    def check_prefill(self, group: GroupSpec, given: PrefillLayout, with_kv: bool) -> None:
        """Raises ``InvalidRequest``."""
        if given.block_tokens < 1 or given != self.prefill(group, given.boundary, with_kv, given.block_tokens):
            raise InvalidRequest(f"the prefill exported for {group.group_id} does not match the model and the request")
