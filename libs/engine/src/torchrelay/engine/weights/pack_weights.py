"""The tensors of a pack: views on a CPU, one copy per segment on other devices.

No byte is touched before its segment is loaded, so an instance can be built while its pack is still arriving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import cast

import torch
from torch import Tensor

from torchrelay.common.errors import DataCorrupted
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.kernels.layer import Int8Matrix, LayerWeights, Matrix
from torchrelay.engine.weights.device_link import CopyEvent, DeviceLink
from torchrelay.engine.weights.segment_gate import SegmentGate
from torchrelay.engine.weights.stager import Stager
from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.tensor_order import SCALES, TensorSpec, tensors_by_segment
from torchrelay.transfer.manifest import Manifest, TensorEntry

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}


class PackWeights:
    """The segments of one pack.

    ``load`` runs on any thread, the rest on the engine's. Uses of a missing segment raise ``LoadFailed``.
    """

    def __init__(self, manifest: Manifest, config: ModelConfig, data: memoryview, link: DeviceLink | None) -> None:
        """``link`` copies to the device. None: computations read ``data`` in place."""
        self.dtype = TORCH_DTYPES[manifest.dtype]
        self.gate = SegmentGate(config.num_segments)
        self._config = config
        self._manifest = manifest
        self._slots = tuple(tensors_by_segment(config))
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._bytes: Tensor | None = as_tensor(data)
        self._groups: list[Mapping[str, Tensor]] = [{}] * config.num_segments
        self._layers: list[LayerWeights | None] = [None] * config.num_layers
        self._head: Matrix | None = None  # only if it was replaced
        self._link = link
        self._stager = None if link is None else Stager(self._bytes, link, self.gate.fail, self._await_copies)
        self._are_copied = link is None
        self._submitted: set[int] = set()
        self._events: dict[int, CopyEvent] = {}  # of segments that the computing thread has not joined yet

    def load(self, segment: int) -> None:
        """(any thread) Takes a verified segment into use; to a GPU it is copied. Idempotent."""
        if self._bytes is None or self.gate.is_open(segment) or segment in self._submitted:
            return
        span = self._manifest.segments[segment]
        if self._stager is None:
            self._take(segment, self._bytes[span.begin : span.end])
            return
        self._submitted.add(segment)
        self._stager.submit(span.begin, span.end - span.begin, lambda there: self._take(segment, there))

    def _take(self, segment: int, there: Tensor) -> None:
        """Uses the bytes in ``there``, which are complete for any thread that joins the event recorded here."""
        begin = self._manifest.segments[segment].begin
        groups = {
            name: self._view(there, begin, tuple(slots))
            for name, slots in groupby(self._slots[segment], key=lambda slot: slot.group)
        }
        self._groups[segment] = groups
        if 0 < segment <= self._config.num_layers and self._config.encoder is None:
            self._layers[segment - 1] = _layer(groups, self._config)
        if self._link is not None:
            self._events[segment] = self._link.event()
        self.gate.open(segment)

    def _await_copies(self) -> None:
        """(staging thread) Waits, once the copies of all segments have started, for the last of them."""
        if self._link is not None and self.gate.all_open:
            self._link.event().wait()
            self._are_copied = True
            self.gate.on_change()

    @property
    def are_settled(self) -> bool:
        """(any thread) Whether the device has the bytes of every segment, or never will."""
        return self.gate.all_settled and (self._are_copied or bool(self.gate.failure))

    def _require(self, segment: int) -> None:
        self.gate.require(segment)
        if self._events and (event := self._events.pop(segment, None)) is not None:
            event.join()

    @property
    def num_bytes(self) -> int:
        return self._manifest.num_bytes

    def segment(self, segment: int) -> Mapping[str, Tensor]:
        """The tensors of a segment by group."""
        self._require(segment)
        return self._groups[segment]

    def embedding(self) -> Tensor:
        self._require(0)
        return self._groups[0]["embed"]

    def layer(self, layer: int) -> LayerWeights:
        self._require(layer + 1)
        weights = self._layers[layer]
        assert weights is not None, "an open segment is loaded"
        return weights

    def layers(self, begin: int, end: int) -> Sequence[LayerWeights]:
        """Returns the first of these layers and, once the whole pack has arrived, the layers after it.

        While the pack arrives, the cores are divided between arrival and computation before each layer.
        """
        first = self.layer(begin)
        if not self.gate.all_open:
            return [first]
        if self._events:
            for layer in range(begin + 1, end):
                self._require(layer + 1)
        return cast(Sequence[LayerWeights], self._layers[begin:end])

    def final_norm(self) -> Tensor:
        self._require(self._config.num_segments - 1)
        return self._groups[-1]["norm"]

    @property
    def has_head(self) -> bool:
        return self._config.has_head

    def head(self) -> Matrix:
        if self._head is not None:
            return self._head
        if self._config.tied_embeddings:
            return self.embedding()
        self._require(self._config.num_segments - 1)
        return _matrix(self._groups[-1], "head")

    def replace_layer(self, layer: int, weights: LayerWeights) -> None:
        """(any thread) Replaces a layer by the same weights in another form, from the next ``layer`` call on."""
        self._layers[layer] = weights

    def replace_head(self, head: Matrix) -> None:
        """(any thread) Replaces the head like ``replace_layer``."""
        self._head = head

    def close(self) -> None:
        """Releases the pack's memory; later uses of segments that are not open fail."""
        self.gate.fail("the instance was closed")
        if self._stager is not None:
            self._stager.close()
        self._bytes = None
        self._groups.clear()
        self._layers.clear()
        self._head = None

    def _view(self, segment: Tensor, segment_begin: int, slots: tuple[TensorSpec, ...]) -> Tensor:
        """A tensor over a whole group, stacked along the first axis."""
        entries = [self._entry(slot) for slot in slots]
        if any(before.offset + before.num_bytes != after.offset for before, after in pairwise(entries)):
            raise DataCorrupted(f"{slots[0].name} and the tensors fused with it must be contiguous in the pack")
        begin = entries[0].offset - segment_begin
        end = entries[-1].offset + entries[-1].num_bytes - segment_begin
        shape = (sum(slot.shape[0] for slot in slots), *slots[0].shape[1:])
        stored = segment[begin:end].view(TORCH_DTYPES[entries[0].dtype]).view(shape)
        if stored.dtype == torch.int8:
            return stored
        # NOTE: .to() is free for tensors in that dtype; tensors in another dtype, such as fp32 norms, are small.
        return stored.flatten().float() if slots[0].is_scale else stored.to(self.dtype)

    def _entry(self, slot: TensorSpec) -> TensorEntry:
        entry = self._entries.get(slot.name)
        if entry is None or tuple(entry.shape) != slot.shape:
            raise DataCorrupted(f"the pack has no {slot.name} of shape {list(slot.shape)}")
        return entry


def _matrix(groups: Mapping[str, Tensor], name: str) -> Tensor | Int8Matrix:
    scales = groups.get(name + SCALES)
    return groups[name] if scales is None else Int8Matrix(groups[name], scales)


def _layer(groups: Mapping[str, Tensor], config: ModelConfig) -> LayerWeights:
    qk_norm = None
    if config.architecture.qk_norm:
        # A single norm over query and key heads, which are adjacent after the fused projection.
        per_query = groups["q_norm"].expand(config.num_heads, -1)
        qk_norm = torch.cat([per_query, groups["k_norm"].expand(config.num_kv_heads, -1)])
    gate_up, down = _matrix(groups, "gate_up"), _matrix(groups, "down")
    if config.experts is not None and "router" in groups:
        gate_up, down = _by_expert(gate_up, config.experts.count), _by_expert(down, config.experts.count)
    return LayerWeights(
        input_norm=groups.get("input_norm"),
        attention_out_norm=groups.get("attention_out_norm"),
        post_norm=groups.get("post_norm"),
        mlp_out_norm=groups.get("mlp_out_norm"),
        qkv=_matrix(groups, "qkv"),
        qkv_bias=groups.get("qkv_bias"),
        qk_norm=qk_norm,
        o=_matrix(groups, "o"),
        router=groups.get("router"),
        gate_up=gate_up,
        down=down,
        o_bias=groups.get("o_bias"),
        gate_up_bias=groups.get("gate_up_bias"),
        down_bias=groups.get("down_bias"),
        wide_qk_norm=(groups["wide_q_norm"], groups["wide_k_norm"]) if "wide_q_norm" in groups else None,
        shared_gate=groups.get("shared_gate"),
        shared_gate_up=_matrix(groups, "shared_gate_up") if "shared_gate_up" in groups else None,
        shared_down=_matrix(groups, "shared_down") if "shared_down" in groups else None,
    )


def _by_expert(stacked: Tensor | Int8Matrix, count: int) -> Tensor | Int8Matrix:
    """A weight of all experts, with a leading axis of experts."""
    if isinstance(stacked, Int8Matrix):
        return Int8Matrix(stacked.numbers.view(count, -1, stacked.numbers.shape[-1]), stacked.scales.view(count, -1))
    return stacked.view(count, -1, stacked.shape[-1])
