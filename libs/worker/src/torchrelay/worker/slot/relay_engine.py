"""Torchrelay's own engine, of ``libs/engine``, in a slot."""

from __future__ import annotations

import os

from torchrelay.common.host.owned_folder import OwnedFolder
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.threads import ThreadBudget
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.warm_up import warm_up
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.compiled_code import compiled_folder
from torchrelay.worker.slot.engine import Capabilities, Engine, EngineHooks


class RelayEngine(Engine):
    """Computes with the weights in place, layer by layer while they arrive."""

    capabilities = Capabilities("torchrelay", kv_handover=True, layer_spans=True)

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._compiled: OwnedFolder | None = None
        self._pool = KvPool(settings.kv_pool_bytes, settings.device)
        cores_file = settings.cores_file if self._pool.device.type == "cpu" else None
        self._active_processes = None if cores_file is None else ActiveProcesses(cores_file)

    def start(self) -> None:
        warm_up(self._pool)
        self.memory_bytes_per_s = self._pool.read_rate()

    def compiled_folder(self) -> OwnedFolder | None:
        """The same for all loads, because a process compiles a kernel once for all models."""
        if self._compiled is None and self._settings.device != "cpu":
            self._compiled = compiled_folder()
        return self._compiled

    def load(self, slab: MappedSlab, hooks: EngineHooks) -> Instance:
        settings = self._settings
        if hooks.compiled is not None:
            os.environ["TRITON_CACHE_DIR"] = str(hooks.compiled)  # read at each compilation
        self.check_computes(slab.manifest)
        return Instance(
            slab.manifest,
            slab.data,
            self._pool,
            token_budget=settings.token_budget,
            kv_block_tokens=settings.kv_block_tokens,
            prefix_cache=settings.prefix_cache,
            cpu_reorder=settings.cpu_reorder,
            on_segment=hooks.wake,
            active_processes=self._active_processes,
            threads=ThreadBudget(
                slab.manifest.num_bytes,
                self._active_processes,
                max_threads=hooks.max_threads if self._pool.device.type == "cpu" else 0,
            ),
            latency=hooks.latency,
            between_layers=hooks.run_short_commands,
            decodes="decode" in settings.role_names,
        )
