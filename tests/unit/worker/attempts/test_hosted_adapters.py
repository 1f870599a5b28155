"""The adapters that a worker keeps beside the hosted model."""

from __future__ import annotations

import asyncio
from weakref import ref

import pytest

from torchrelay.common.errors import Overloaded, Unavailable
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.kernels.low_rank import Adapter
from torchrelay.worker.attempts.hosted_adapters import HostedAdapters, Reserve


class Made:
    """Adapters of 10 bytes, and the ids of those that were made."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.failures = 0
        self.last: ref[Adapter] | None = None

    async def read(self, digest: str) -> bytes:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise Unavailable("the store is away")
        return digest.encode()

    async def make(self, adapter_id: str, document: bytes, weights: bytes, reserve: Reserve) -> Adapter:
        assert (document, weights) == (b"config", b"weights")
        reserve(10)
        self.ids.append(adapter_id)
        adapter = Adapter(adapter_id, (), 10)
        self.last = ref(adapter)
        return adapter


def named(adapter_id: str) -> types_pb2.Adapter:
    return types_pb2.Adapter(adapter_id=adapter_id, config_digest="config", weights_digest="weights")


async def test_each_adapter_is_made_once_and_the_longest_unused_leaves_first() -> None:
    made = Made()
    hosted = HostedAdapters(made.read, max_bytes=20)
    first, again = await asyncio.gather(*(hosted.get("i1", named("a"), made.make) for _ in range(2)))
    assert first is again and made.ids == ["a"]
    del first, again
    for adapter_id in ("b", "a", "c", "a", "b"):
        assert (await hosted.get("i1", named(adapter_id), made.make)).adapter_id == adapter_id
    assert made.ids == ["a", "b", "c", "b"]


async def test_adapters_leave_with_their_instance() -> None:
    made = Made()
    hosted = HostedAdapters(made.read)
    for instance_id in ("i1", "i1", "i2", "i2"):
        await hosted.get(instance_id, named("a"), made.make)
    assert made.ids == ["a", "a"]


async def test_a_failed_read_is_not_kept() -> None:
    made = Made()
    made.failures = 1
    hosted = HostedAdapters(made.read, max_bytes=10)
    with pytest.raises(Unavailable):
        await hosted.get("i1", named("a"), made.make)
    assert (await hosted.get("i1", named("a"), made.make)).adapter_id == "a"
    assert made.ids == ["a"]


async def test_adapters_of_running_groups_count_and_are_not_read_twice() -> None:
    """They were in memory beyond the limit once others had taken their places."""
    made = Made()
    hosted = HostedAdapters(made.read, max_bytes=20)
    running = [await hosted.get("i1", named(adapter_id), made.make) for adapter_id in ("a", "b")]
    with pytest.raises(
        Overloaded, match="the adapter has 10 B and those of running requests 20 B; a worker holds 20 B"
    ):
        await hosted.get("i1", named("c"), made.make)
    assert await hosted.get("i1", named("a"), made.make) is running[0]
    assert made.ids == ["a", "b"]
    del running[1]
    assert (await hosted.get("i1", named("c"), made.make)).adapter_id == "c"


async def test_unloaded_model_leaves_no_adapter() -> None:
    made = Made()
    hosted = HostedAdapters(made.read)
    await hosted.get("i1", named("a"), made.make)
    assert made.last is not None and made.last() is not None
    hosted.clear()
    assert made.last() is None


async def test_a_refused_adapter_evicts_nothing_and_others_evict_only_what_they_need() -> None:
    """A refusal evicted all adapters, and one that fitted began with those of running groups, which frees nothing."""
    made = Made()
    hosted = HostedAdapters(made.read, max_bytes=40)
    running = [await hosted.get("i1", named(adapter_id), made.make) for adapter_id in ("a", "b")]
    for adapter_id in ("c", "d"):
        await hosted.get("i1", named(adapter_id), made.make)

    async def large(adapter_id: str, document: bytes, weights: bytes, reserve: Reserve) -> Adapter:
        reserve(30)
        return Adapter(adapter_id, (), 30)

    with pytest.raises(Overloaded, match="has 30 B and those of running requests 20 B; a worker holds 40 B"):
        await hosted.get("i1", named("large"), large)
    await hosted.get("i1", named("e"), made.make)
    for adapter_id in ("d", "e"):
        await hosted.get("i1", named(adapter_id), made.make)
    assert made.ids == ["a", "b", "c", "d", "e"], "c alone was evicted, for e"
    running.clear()
    for adapter_id in ("a", "b"):
        await hosted.get("i1", named(adapter_id), made.make)
    assert made.ids == ["a", "b", "c", "d", "e"]
