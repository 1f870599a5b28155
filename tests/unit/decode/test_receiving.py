"""The decode role receives KV: the order of offers that wait for pages, and the address to read from."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

import pytest

from torchrelay.control.v1 import decode_pb2, types_pb2
from torchrelay.decode.kv_receiver import KvReceiver
from torchrelay.decode.page_queue import PageQueue
from torchrelay.engine.core import KvPoolFull
from torchrelay.engine.kv.kv_import import KvImport
from torchrelay.engine.kv.layout import KvLayout, KvSequence, KvShape
from torchrelay.transfer.errors import SourcesExhausted
from torchrelay.transfer.fetch.sources import Receiver
from torchrelay.transfer.protocol.tickets import TicketIssuer, derive_node_key
from torchrelay.transfer.transport.interface import Connection, Listener


class Pool:
    """Counts free pages, and lists the offers that asked for pages and got them."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.asked: list[str] = []
        self.served: list[str] = []
        self.unwanted: set[str] = set()
        self.queue = PageQueue()

    async def offer(self, name: str, num_pages: int) -> str | None:
        async def reserve() -> str:
            self.asked.append(name)
            await asyncio.sleep(0)
            if num_pages > self.num_free:
                raise KvPoolFull("no pages")
            self.num_free -= num_pages
            self.served.append(name)
            return name

        return await self.queue.reserve(reserve, lambda: name not in self.unwanted)

    async def free(self, num_pages: int) -> None:
        self.num_free += num_pages
        self.queue.pages_freed()
        for _ in range(20):
            await asyncio.sleep(0)


async def waiting(pool: Pool, *offers: tuple[str, int]) -> list[asyncio.Task[str | None]]:
    tasks = []
    for offer in offers:
        tasks.append(asyncio.ensure_future(pool.offer(*offer)))
        await asyncio.sleep(0)
    await pool.free(0)
    return tasks


async def test_small_offers_do_not_overtake_large_offer() -> None:
    """If all waiting offers were woken together, the first to reach the engine would take the pages."""
    pool = Pool(num_free=0)
    tasks = await waiting(pool, ("large", 8), ("small 1", 1), ("small 2", 1))
    for _ in range(7):
        await pool.free(1)
    assert pool.served == [] and set(pool.asked) == {"large"}
    await pool.free(2)
    assert pool.served == ["large", "small 1"]
    await pool.free(1)
    assert await asyncio.gather(*tasks) == ["large", "small 1", "small 2"]


async def test_next_offer_tries_when_offer_ends() -> None:
    pool = Pool(num_free=1)
    large, unwanted, small = await waiting(pool, ("large", 8), ("unwanted", 8), ("small", 1))
    pool.unwanted.add("unwanted")
    pool.queue.attempt_ended()
    assert await unwanted is None and pool.served == []
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    assert await small == "small"


async def test_next_offer_tries_when_offer_fails() -> None:
    pool = Pool(num_free=0)

    async def mismatch() -> None:
        raise ValueError("another layout")

    (small,) = await waiting(pool, ("small", 1))
    failing = asyncio.ensure_future(pool.queue.reserve(mismatch, lambda: True))
    await pool.free(1)
    assert await small == "small"
    with pytest.raises(ValueError, match="another layout"):
        await failing


KEY = b"the cluster's own master key, 32"
LAYOUT = KvLayout(KvShape(num_layers=1, num_kv_heads=1, head_dim=4, dtype_bytes=4), 2, (KvSequence((0,), 3),))


class Nowhere:
    """A transport that connects to nothing and records the addresses."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def listen(self, host: str, port: int) -> Listener:
        raise OSError("this transport does not listen")

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        self.addresses.append(address)
        raise ConnectionRefusedError(address)


@pytest.mark.parametrize(
    ("offered_host", "offered_local", "own_host", "address"),
    [
        ("rack-1", "shm:/local", "rack-1", "shm:/local|10.0.0.1:7"),
        ("rack-1", "shm:/local", "rack-2", "10.0.0.1:7"),
        ("rack-1", "", "rack-1", "10.0.0.1:7"),
        ("", "shm:/local", "", "10.0.0.1:7"),  # an unnamed host is not the same host
    ],
)
def test_local_address_is_used_on_same_host_only(
    offered_host: str, offered_local: str, own_host: str, address: str
) -> None:
    ticket = TicketIssuer(KEY).issue("req-1/1", "pre-1", "dec-1", 1 << 50)
    source = types_pb2.Source(holder_id="pre-1", data_address="10.0.0.1:7", ticket=ticket)
    offer = decode_pb2.KvOffer(source=source, host_id=offered_host, local_address=offered_local)
    transport = Nowhere()
    receiver = Receiver("dec-1", derive_node_key(KEY, "dec-1"))
    incoming = KvReceiver(offer, cast(KvImport, SimpleNamespace(layout=LAYOUT)), receiver, transport, own_host)
    with pytest.raises(SourcesExhausted):
        incoming.receive(lambda write, stop: None, stall_s=1.0)
    assert set(transport.addresses) == {address}
