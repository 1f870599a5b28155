"""The engine of a slot that vLLM computes in."""

from __future__ import annotations

import os

# vLLM reads these when it is imported. The worker owns its threads, and nothing is fetched or sent.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the second accepts no processor of logits such as ours
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from torchrelay.common.host.machine import SHARED_MEMORY
from torchrelay.common.host.owned_folder import OwnedFolder, remove_stale_folders
from torchrelay.engine.read_rate import measure_read_rate
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.vllm.adapter_folder import ADAPTER_PREFIX
from torchrelay.vllm.device_group import DeviceGroup
from torchrelay.vllm.served_model import VllmModel
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.compiled_code import compiled_folder
from torchrelay.worker.slot.engine import Capabilities, Engine, EngineHooks

_PROBE_BYTES = 256 << 20


class VllmEngine(Engine):
    """Imports vLLM before the slot is offered, which takes half a minute; its memory comes with each model."""

    capabilities = Capabilities("vllm", kv_handover=False, layer_spans=False)
    splits_models = True

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._group = DeviceGroup(settings.devices, int(settings.device.partition(":")[2] or 0))
        if settings.device == "cpu":
            # vLLM 0.32 cannot read there what it has saved of a whole model, and would compile the model at each start.
            os.environ["VLLM_USE_AOT_COMPILE"] = "0"

    def start(self) -> None:
        """Starts the processes of the further devices; the import of this module has warmed this process up."""
        remove_stale_folders(ADAPTER_PREFIX, SHARED_MEMORY)
        num_threads = max(torch.get_num_threads() // self._settings.devices, 1)
        torch.set_num_threads(num_threads)
        self._group.start(num_threads)
        memory = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self._settings.device)
        self.memory_bytes_per_s = self._settings.devices * measure_read_rate(memory)

    def compiled_folder(self) -> OwnedFolder | None:
        return compiled_folder() if self._settings.vllm_graphs else None

    def load(self, slab: MappedSlab, hooks: EngineHooks) -> VllmModel:
        self.check_computes(slab.manifest)
        return VllmModel(slab, self._settings, hooks, self._group)

    def close(self) -> None:
        self._group.stop()
