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
        return Adapter(adapter_id, (), 10)


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
    adapter = ref(await hosted.get("i1", named("a"), made.make))
    assert adapter() is not None
    hosted.clear()
    assert adapter() is None
