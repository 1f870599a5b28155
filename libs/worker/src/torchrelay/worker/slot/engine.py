"""The interface between a slot and what computes in it: an engine, and the model that it serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from torchrelay.common.host.owned_folder import OwnedFolder
from torchrelay.common.latency.latency_model import LatencyModel, StepWork
from torchrelay.engine.core import GroupAdapterReader, GroupSpec, LoadFailed, StepResult
from torchrelay.modelspec.opaque import read_model
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.transfer.manifest import Manifest
from torchrelay.worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The name of an engine and its abilities; ``EngineCapabilities`` of ``reports.proto`` describes the fields."""

    engine: str
    kv_handover: bool
    layer_spans: bool


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """The calls that an engine makes to its worker, and what a load asks of it."""

    wake: Callable[[], None]  # (any thread) there may be work now, or the model is ready
    run_short_commands: Callable[[], None]  # (engine's thread) runs what must not wait for the end of a step
    latency: Callable[[], LatencyModel | None]  # (any thread) predicts the steps of the model in the slot
    compiled: Path | None = None  # where the compilers of this load write; None: where they do by themselves
    max_threads: int = 0  # of a computation on a CPU, as the model's operator has set it; 0: no limit


class ServedModel(Protocol):
    """A model in a slot. All methods run on the engine's thread, except those marked (any thread).

    It exists before its weights arrive, and takes prompts from then on.
    """

    def segment_ready(self, segment: int) -> None:
        """(any thread) Takes a segment into use whose bytes are verified. Idempotent."""

    def fail(self, reason: str) -> None:
        """(any thread) Declares that no more bytes will arrive: a step that needs more raises ``LoadFailed``."""

    @property
    def is_ready(self) -> bool:
        """(any thread) Whether steps compute whole batches: the device has the weights and the engine has started.

        Raises ``LoadFailed`` if it never will.
        """

    def close(self) -> None:
        """Releases the memory of the model, so that its mapping can be closed."""

    def prefill(self, group: GroupSpec) -> None:
        """Queues a prompt, which decodes here. Raises ``InvalidRequest`` or ``Conflict``."""

    def adapter_reader(self, adapter_id: str, document: bytes, weights: bytes) -> GroupAdapterReader:
        """(any thread) Reads a LoRA adapter of the model from PEFT's two files. Raises ``TorchrelayError``."""

    def cancel(self, group_id: str, choice: int | None = None) -> None:
        """Frees the pages of a group, or of one choice, at once; it yields no more tokens."""

    def cancel_soon(self, group_id: str, choice: int | None = None) -> None:
        """(any thread) Does the same as ``cancel`` as soon as the running step allows, or before the next step."""

    def has_work(self) -> bool:
        """Whether a step would compute anything now."""

    def max_sleep_s(self) -> float | None:
        """Seconds that the driver may sleep: until there is work, or a group's deadline. None: until the next call."""

    def step(self) -> StepResult:
        """Computes a batch; ends groups past their deadline. Raises ``LoadFailed``."""

    def check_integrity(self) -> None:
        """Compares the page counts with all tables. Raises ``AssertionError``."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def running_work(self) -> StepWork:
        """(any thread) The work of the running step, or of the last step."""

    @property
    def is_recording(self) -> bool:
        """(any thread) Whether the running step takes longer than its work would."""

    @property
    def num_advances(self) -> int:
        """(any thread) A count that rises while a step advances."""


class Engine(ABC):
    """Computes the models of one slot, one after the other. All methods run on the engine's thread.

    ``device`` in ``settings`` is resolved.
    """

    capabilities: ClassVar[Capabilities]
    splits_models: ClassVar[bool] = False  # over the devices of a slot, if it has several
    memory_bytes_per_s = 0.0  # that the device reads, as ``start`` measures it; 0: it does not

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings

    def check_computes(self, manifest: Manifest) -> None:
        """Raises ``LoadFailed`` if only another engine computes the weights of the pack."""
        engine = read_model(manifest.config, is_opaque=manifest.is_opaque).needed_engine
        if engine not in ("", self.capabilities.engine):
            raise LoadFailed(f"only the engine {engine} computes these weights")

    def compiled_folder(self) -> OwnedFolder | None:
        """The folder for what the next load compiles; None: loads compile nothing."""
        return None

    @abstractmethod
    def start(self) -> None:
        """Allocates the memory of the slot and warms the process up, before the slot is offered."""

    @abstractmethod
    def load(self, slab: MappedSlab, hooks: EngineHooks) -> ServedModel:
        """The model of a pack that may still be arriving. Waits for none of its bytes."""

    def close(self) -> None:  # noqa: B027
        """Ends what ``start`` has started. No model is in the slot."""
