"""Downloads a pack from the remote store: concurrent reads straight into the arena, every chunk verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from torchrelay.common.errors import DataCorrupted, Unavailable
from torchrelay.common.quantities import format_count
from torchrelay.param_store.remote.remote_store import RangeReader
from torchrelay.transfer.buffers import Sink

_MAX_LISTED_CHUNKS = 8  # in an error about damaged chunks


def download_from_remote(
    pack_id: str,
    reader: RangeReader,
    chunk_bytes: int,
    sink: Sink,
    wanted: Iterable[int],
    stop: threading.Event,
    on_chunk: Callable[[int], None],
    on_damage: Callable[[], None],
    num_readers: int,
) -> None:
    """Reads the wanted chunks in order, ``num_readers`` at a time: while one thread hashes, the others read.

    Returns early when ``stop`` is set. Calls ``on_chunk`` for each verified chunk and ``on_damage`` for each read that
    does not match its digest. Such a chunk is read again if that may help. Chunks that stay damaged are skipped, and
    ``DataCorrupted`` is raised after the others have arrived. Any other error of the reader or the sink ends the
    download immediately. ``wanted`` is advanced only when a reader is free.

    NOTE: bytes are in the sink's memory before they are verified, so no other source may deliver a chunk of ``wanted``.
    """
    todo = iter(wanted)
    damaged: list[int] = []
    lock = threading.Lock()
    broken = threading.Event()

    def next_index() -> int | None:
        with lock:
            return None if stop.is_set() or broken.is_set() else next(todo, None)

    def fetch_chunk(index: int) -> bool:
        offset, view = index * chunk_bytes, sink.chunk(index)

        def is_good() -> bool:
            matches = blake3(view).digest() == sink.digest(index)
            if not matches:
                on_damage()
            return matches

        reader.read_into(offset, view, stop)
        return is_good() or (reader.read_again(offset, view, stop) and is_good())

    def read() -> None:
        try:
            while (index := next_index()) is not None:
                if fetch_chunk(index):
                    sink.accept(index)
                    on_chunk(index)
                else:
                    damaged.append(index)
        except BaseException as error:
            broken.set()  # ends the other readers; result() below raises this error
            if not (isinstance(error, Unavailable) and stop.is_set()):
                raise

    with ThreadPoolExecutor(num_readers, thread_name_prefix="remote-read") as pool:
        reads = [pool.submit(read) for _ in range(num_readers)]
    for done in reads:
        done.result()
    if damaged:
        listed = sorted(damaged)[:_MAX_LISTED_CHUNKS]
        where = ", ".join(map(str, listed)) + (", ..." if len(listed) < len(damaged) else "")
        num = format_count(len(damaged), "chunk")
        raise DataCorrupted(f"pack {pack_id} is damaged in the remote store: {num} ({where})")
