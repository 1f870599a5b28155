"""Small packs, holders on loopback, and misbehaving peers, for the tests of the data plane."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from blake3 import blake3

from torchrelay.transfer.buffers import Buffer, MemoryBuffer, Sink
from torchrelay.transfer.fetch.follow import FollowOptions, TransferControl, follow
from torchrelay.transfer.fetch.sources import Receiver, SourceAddress
from torchrelay.transfer.manifest import Manifest, Segment, pack_id_of
from torchrelay.transfer.protocol.tickets import TicketIssuer, derive_node_key
from torchrelay.transfer.serve.holder import HolderLimits, HolderServer
from torchrelay.transfer.transport.interface import Transport
from torchrelay.transfer.transport.tcp import TcpTransport

CLUSTER_KEY = b"the cluster's own master key, 32"
ISSUER = TicketIssuer(CLUSTER_KEY)
FAR = 1 << 50  # an expiry that no test reaches


def make_pack(num_bytes: int, chunk_bytes: int = 4096, seed: int = 0) -> tuple[bytes, Manifest]:
    """Random bytes and their manifest; small chunks, which the format allows."""
    data = random.Random(seed).randbytes(num_bytes)
    digests = tuple(blake3(data[at : at + chunk_bytes]).digest() for at in range(0, num_bytes, chunk_bytes))
    manifest = Manifest(
        architecture="LlamaForCausalLM",
        dtype="F32",
        config={"seed": seed},
        tensors=(),
        segments=(Segment(0, num_bytes),),
        num_bytes=num_bytes,
        chunk_bytes=chunk_bytes,
        chunk_digests=digests,
    )
    return data, manifest


class SamplePack:
    """A pack of random bytes in small chunks, the buffers that serve it and the sinks that receive it."""

    def __init__(self, num_bytes: int, chunk_bytes: int = 4096, seed: int = 0) -> None:
        self.data, self.manifest = make_pack(num_bytes, chunk_bytes, seed)
        self.head = self.manifest.encode()
        self.pack_id = pack_id_of(self.head)
        self.chunks = range(self.manifest.num_chunks)

    def buffer(self, num_published: int | None = None) -> FixedBuffer:
        """A buffer with the first ``num_published`` chunks; None: all chunks."""
        return FixedBuffer(self, num_published)

    def sink(self) -> PackSink:
        return PackSink(self)

    def source(
        self, address: str, holder_id: str = "host-h", receiver_id: str = "host-r", expires: int = FAR
    ) -> SourceAddress:
        return source_at(address, self.pack_id, holder_id, receiver_id, expires)

    def follow(
        self,
        sources: Sequence[SourceAddress],
        sink: Sink,
        wanted: Sequence[int] | None = None,
        receiver_id: str = "host-r",
        control: TransferControl | None = None,
        **options: Any,
    ) -> Generator[int, None, None]:
        """Follows all chunks, or those wanted; ``options`` are those of ``FollowOptions``."""
        wanted = self.chunks if wanted is None else wanted
        return follow(self.pack_id, wanted, sources, sink, receiver(receiver_id), FollowOptions(**options), control)


class FixedBuffer(MemoryBuffer):
    """A pack in plain memory, whose chunks are published from the start or by the test."""

    def __init__(self, pack: SamplePack, num_published: int | None = None) -> None:
        spans = [pack.manifest.chunk_range(index) for index in pack.chunks]
        super().__init__(pack.pack_id, [span.end - span.begin for span in spans])
        self.head = pack.head
        self.pieces = [pack.data[span.begin : span.end] for span in spans]
        for index in range(self.num_chunks if num_published is None else num_published):
            self.show(index)

    def show(self, *indices: int) -> None:
        """Publishes these chunks with the pack's bytes."""
        for index in indices:
            self.publish(index, self.pieces[index])


class PackSink(FixedBuffer):
    """An empty pack to receive into, which can be served meanwhile; records the accepted chunks."""

    def __init__(self, pack: SamplePack) -> None:
        super().__init__(pack, num_published=0)
        self.accepted: list[int] = []
        self._expected = pack.manifest.chunk_digests

    def digest(self, index: int) -> bytes:
        return self._expected[index]

    def accept(self, index: int) -> None:
        self.accepted.append(index)
        self.publish(index)

    @property
    def bytes_held(self) -> bytes:
        return b"".join(bytes(self.chunk(index)) for index in range(self.num_chunks))


class BlindSink:
    """A sink that trusts the digest in each frame, like the receiver of KV."""

    def __init__(self, num_chunks: int, chunk_bytes: int) -> None:
        self.chunks = [bytearray(chunk_bytes) for _ in range(num_chunks)]

    def chunk(self, index: int) -> memoryview:
        return memoryview(self.chunks[index])

    def digest(self, index: int) -> bytes | None:
        return None

    def accept(self, index: int) -> None:
        """Nothing to record."""


class Interrupted(list[int]):
    """Wanted chunks that are all published while the first of them is being examined."""

    def __init__(self, indices: Iterable[int], publish: Callable[[int], None]) -> None:
        super().__init__(indices)
        self._publish: Callable[[int], None] | None = publish

    def __iter__(self) -> Iterator[int]:
        publish, self._publish = self._publish, None
        for place, index in enumerate(super().__iter__()):
            if place == 1 and publish is not None:
                for chunk in super().__iter__():
                    publish(chunk)
            yield index


def receiver(receiver_id: str = "host-r") -> Receiver:
    return Receiver(receiver_id, derive_node_key(CLUSTER_KEY, receiver_id))


@contextmanager
def serving(
    *buffers: Buffer,
    holder_id: str = "host-h",
    find: Callable[[str], Buffer | None] | None = None,
    transport: Transport | None = None,
    host: str = "127.0.0.1",
    limits: HolderLimits | None = None,
    unix_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> Iterator[HolderServer]:
    """A holder on loopback that serves these buffers."""
    held = {buffer.buffer_id: buffer for buffer in buffers}
    listener = (transport or TcpTransport()).listen(host, 0)
    key = derive_node_key(CLUSTER_KEY, holder_id)
    server = HolderServer(
        holder_id, key, find or held.get, listener, limits or HolderLimits(find_timeout_s=0.2), unix_ms
    )
    server.start()
    try:
        yield server
    finally:
        server.close()


def source_at(
    address: str, buffer_id: str, holder_id: str = "host-h", receiver_id: str = "host-r", expires: int = FAR
) -> SourceAddress:
    return SourceAddress(holder_id, address, ISSUER.issue(buffer_id, holder_id, receiver_id, expires))


@contextmanager
def silent_listener() -> Iterator[str]:
    """Accepts connections and never sends a byte; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def tampering_proxy(target: str, tamper: Callable[[bytes, int], bytes | None]) -> Iterator[str]:
    """A proxy in front of a holder. ``tamper(data, offset)`` changes what the holder sends; None: disconnects."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def forward(connected: socket.socket) -> None:
        host, port = target.rsplit(":", 1)
        with connected, socket.create_connection((host, int(port))) as holder:
            upward = threading.Thread(target=_pump, args=(connected, holder), daemon=True)
            upward.start()
            offset = 0
            while data := holder.recv(1 << 16):
                changed = tamper(data, offset)
                if changed is None:
                    break
                offset += len(data)
                try:
                    connected.sendall(changed)
                except OSError:  # the follower has closed
                    break
            for end in (connected, holder):
                _shut(end)
            upward.join()

    def accept() -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:  # the listener was closed
                return
            thread = threading.Thread(target=forward, args=(connected,), daemon=True)
            threads.append(thread)
            thread.start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        _shut(listener)
        listener.close()
        accepting.join()
        for thread in threads:
            thread.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one end is gone
        return


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed already
        return
