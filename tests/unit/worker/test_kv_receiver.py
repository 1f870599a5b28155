"""The address from which a worker reads offered KV."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from torchrelay.control.v1 import decode_pb2, types_pb2
from torchrelay.engine.kv.kv_import import KvImport
from torchrelay.engine.kv.layout import KvLayout, KvSequence, KvShape
from torchrelay.transfer.errors import SourcesExhausted
from torchrelay.transfer.fetch.sources import Receiver
from torchrelay.transfer.protocol.tickets import TicketIssuer, derive_node_key
from torchrelay.transfer.transport.interface import Connection, Listener
from torchrelay.worker.kv_receiver import KvReceiver

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
