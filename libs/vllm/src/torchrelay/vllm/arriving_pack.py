"""The tensors of a pack in execution order, each as soon as its segment is verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.core import LoadFailed
from torchrelay.transfer.manifest import Manifest

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_TURN_S = 1.0


class ArrivingPack:
    """A mapped pack whose segments are announced on other threads."""

    def __init__(self, manifest: Manifest, data: memoryview, on_turn: Callable[[], None]) -> None:
        """``on_turn`` is called with every tensor, and every second of a wait for bytes: neither is a hang."""
        self._manifest, self._data, self._on_turn = manifest, data, on_turn
        self._num_ready = 0
        self._failure = ""
        self._changed = threading.Condition()

    def __deepcopy__(self, memo: object) -> ArrivingPack:
        return self  # vLLM copies its configuration, and the pack is part of it

    def segment_ready(self, segment: int) -> None:
        """(any thread) Announces a segment; they become ready in order."""
        with self._changed:
            self._num_ready = max(self._num_ready, segment + 1)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """(any thread) Ends the load: bytes will not arrive, or another device has failed."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and views of the arena, valid until the next one. Raises ``LoadFailed``."""
        segment, segments = 0, self._manifest.segments
        whole: torch.Tensor | None = None
        for entry in sorted(self._manifest.tensors, key=lambda entry: entry.offset):
            while entry.offset >= segments[segment].end:
                segment += 1
            self._wait_for(segment)
            whole = as_tensor(self._data) if whole is None else whole
            flat = whole[entry.offset : entry.offset + entry.num_bytes].view(DTYPES[entry.dtype])
            self._on_turn()
            yield entry.name, flat.view(entry.shape)

    def _wait_for(self, segment: int) -> None:
        with self._changed:
            while self._num_ready <= segment and not self._failure:
                self._changed.wait(_TURN_S)
                self._on_turn()
            if self._failure:
                raise LoadFailed(f"segment {segment} of the weights was not loaded: {self._failure}")
