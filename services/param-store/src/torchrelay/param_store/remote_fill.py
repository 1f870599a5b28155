"""Fills a pack from the remote store: several reads under way, straight into the arena, each verified as it lands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from torchrelay.common.errors import DataCorrupted
from torchrelay.param_store.remote import RangeReader
from torchrelay.transfer.buffers import Sink


def fill_from_remote(
    pack_id: str,
    reader: RangeReader,
    chunk_bytes: int,
    sink: Sink,
    wanted: Sequence[int],
    stop: threading.Event,
    on_chunk: Callable[[int], None],
    num_readers: int,
) -> None:
    """Reads the wanted chunks in order, ``num_readers`` at a time: while one thread hashes, the others read.

    Ends early, without an error, when ``stop`` is set. A damaged chunk is left out and the others still come; then
    raises ``DataCorrupted``. ``OSError`` and what the sink raises end it at once.
    """
    todo = iter(wanted)
    damaged: list[int] = []
    taking = threading.Lock()
    broken = threading.Event()

    def take() -> int | None:
        with taking:
            return None if stop.is_set() or broken.is_set() else next(todo, None)

    def read() -> None:
        try:
            while (index := take()) is not None:
                view = sink.chunk(index)
                reader.read_into(index * chunk_bytes, view)
                if blake3(view).digest() == sink.digest(index):
                    sink.accept(index)
                    on_chunk(index)
                else:
                    damaged.append(index)
        except BaseException:
            broken.set()  # the other readers end; this error is raised by result() below
            raise

    with ThreadPoolExecutor(num_readers, thread_name_prefix="remote-read") as pool:
        reads = [pool.submit(read) for _ in range(num_readers)]
    for done in reads:
        done.result()
    if damaged:
        where = ", ".join(str(index) for index in sorted(damaged)[:8])
        raise DataCorrupted(
            f"{len(damaged)} chunks of pack {pack_id} are damaged in the remote store, among them {where}"
        )
