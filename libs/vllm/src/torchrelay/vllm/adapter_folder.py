"""A LoRA adapter of a model in vLLM, which takes it from a folder with PEFT's two files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from torchrelay.common.errors import InvalidRequest, Overloaded
from torchrelay.common.host.machine import SHARED_MEMORY
from torchrelay.common.host.owned_folder import OwnedFolder

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_PREFIX: Final = "torchrelay-adapter-"
_numbers: Final = count(1)  # vLLM tells adapters apart by them


@dataclass(eq=False)
class VllmAdapter:
    """An adapter that vLLM has. Its folder, in shared memory, exists as long as this or a copy: vLLM reads it again
    after it has taken others in the adapter's place.
    """

    adapter_id: str
    num_bytes: int
    request: LoRARequest
    folder: Folder


class Folder(OwnedFolder):
    """A folder in shared memory with the files of an adapter."""

    def __init__(self, document: bytes, weights: bytes) -> None:
        super().__init__(ADAPTER_PREFIX, SHARED_MEMORY)
        (self.path / _CONFIG).write_bytes(document)
        (self.path / _WEIGHTS).write_bytes(weights)


class VllmAdapterReader:
    """Hands the files of an adapter to vLLM, once it has started."""

    def __init__(
        self, started: Callable[[], LLMEngine | None], adapter_id: str, document: bytes, weights: bytes
    ) -> None:
        """``started`` gives vLLM, or None before it has started; it raises ``Conflict`` after its end."""
        self._started, self._adapter_id = started, adapter_id
        self._document, self._weights = document, weights
        self._adapter: VllmAdapter | None = None

    @property
    def num_bytes(self) -> int:
        return len(self._weights)

    def read_part(self) -> bool:
        """Raises ``InvalidRequest`` with vLLM's reason where it refuses the adapter, ``Overloaded`` if shared memory is
        full, and ``Conflict``.
        """
        vllm = self._started()
        if vllm is None:
            return True
        try:
            folder = Folder(self._document, self._weights)
        except OSError as error:
            raise Overloaded(f"{SHARED_MEMORY} does not take the adapter: {error.strerror}", field="model") from error
        request = LoRARequest(self._adapter_id, next(_numbers), str(folder.path))
        try:
            vllm.add_lora(request)
        except Exception as error:  # vLLM documents none
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(f"vLLM does not serve this adapter: {reason}", field="model") from error
        self._adapter = VllmAdapter(self._adapter_id, self.num_bytes, request, folder)
        return False

    def read(self) -> VllmAdapter:
        assert self._adapter is not None
        return self._adapter
