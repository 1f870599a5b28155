"""Rings of host memory between a device and its workers, with copies that run as late as their events allow."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.unit.engine.harness import (
    ModelOf,
    assert_idle,
    copy_into,
    export_prefill,
    group_of,
    half_loaded,
    hand_over,
    import_prefill,
    outputs,
    prompt_of,
    run,
)
from tests.unit.engine.weights.test_pack_weights import LateLink
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv import host_ring
from torchrelay.engine.kv.host_ring import HostRing


def test_downloads_arrive_whole_and_in_order_and_memory_stays_bounded() -> None:
    link, numbers = LateLink(), random.Random(5)
    ring, sent, received = HostRing(link, 100), list[bytes](), list[bytes]()
    for _ in range(300):
        data = torch.tensor([numbers.randrange(256) for _ in range(numbers.randrange(1, 60))], dtype=torch.uint8)
        sent.append(bytes(data.tolist()))
        ring.download(data, lambda data: received.append(bytes(data)))
        assert received == sent[: len(received)]
        assert sum(map(len, sent[len(received) :])) <= 100
    ring.finish()
    assert received == sent
    assert (link.num_buffers, link.num_followed) == (1, 300)
    ring.download(torch.zeros(250, dtype=torch.uint8), lambda data: received.append(bytes(data)))
    ring.finish()
    assert received[-1] == bytes(250) and link.num_buffers == 2, "a larger copy takes a larger ring"


def test_many_small_copies_are_bounded() -> None:
    ring, received = HostRing(LateLink(), 1 << 20), list[int]()
    for number in range(200):
        ring.download(torch.tensor([number], dtype=torch.uint8), lambda data: received.append(data[0]))
    assert len(received) == 200 - host_ring._MAX_COPIES
    ring.finish()
    assert received == list(range(200))


def test_uploads_are_whole_although_their_source_changes_at_once() -> None:
    link = LateLink()
    ring = HostRing(link, 100)
    for number in range(50):
        data = bytearray([number] * (number + 1))
        target = ring.upload(memoryview(data))
        data[:] = bytes(len(data))
        assert target.tolist() == [number] * (number + 1)
    assert link.num_joined == 50 and link.num_buffers == 1


def through_rings(instance: Instance, num_bytes: int = 5000) -> tuple[LateLink, LateLink]:
    """Copies an instance's KV through small rings; returns the links in and out."""
    into, out = LateLink(), LateLink()
    pages = instance.model.pages
    pages.uploads, pages.downloads = HostRing(into, num_bytes), HostRing(out, num_bytes)
    return into, out


@pytest.mark.parametrize("settings", [{}, {"token_budget": 24, "kv_block_tokens": 20}], ids=["one block", "chunks"])
@pytest.mark.parametrize("min_handover_bytes", [1, 1 << 20])
def test_handed_over_kv_is_exact(model_of: ModelOf, settings: dict[str, Any], min_handover_bytes: int) -> None:
    model = model_of()
    source = model.instance(min_handover_bytes=min_handover_bytes, **settings)
    target = model.instance()
    (_, out), (into, _) = through_rings(source), through_rings(target)
    for length in (1, 20, 70):
        last, steps = hand_over(source, target, group_of(prompt_of(length)))
        (first,) = (token.token_id for token in last.tokens)
        assert [first, *outputs(steps)["r/0", 0]] == model.expected(prompt_of(length))
    assert out.started and len(into.started) == len(out.started)
    assert_idle(source)
    assert_idle(target)


def test_imported_layers_are_handed_over_through_ring(model_of: ModelOf) -> None:
    """The prompt moves at a boundary, and its KV goes on to a decode worker."""
    model, prompt = model_of(), prompt_of(50)
    source, middle, target = half_loaded(model, 2), model.instance(), model.instance()
    into, out = through_rings(middle)
    source.prefill(group_of(prompt))
    run(source)
    blocks: dict[int, bytes] = {}
    import_prefill(middle, export_prefill(source), copy_into(blocks))
    assert blocks, "the imported layers leave at once"
    (token,) = (token for step in run(middle) for token in step.tokens)
    layout = middle.kv_layout(group_of(prompt))
    assert sorted(blocks) == list(range(layout.num_kv_chunks)) and into.started and out.started
    kv_import = target.import_kv(group_of(prompt), layout)
    for index, data in blocks.items():
        kv_import.write(index, data)
    kv_import.start({0: token.token_id})
    assert [token.token_id, *outputs(run(target))["r/0", 0]] == model.expected(prompt)
