"""Slabs as buffers and sinks, and their mapping by another process."""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.wait import HANG_S
from tests.unit.transfer.loopback_holders import Interrupted, make_pack
from torchrelay.common.errors import NotFound
from torchrelay.engine.buffers import as_tensor
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.arena.slab_table import TABLE_BYTES
from torchrelay.transfer.errors import ArenaCorrupted, BufferLost

DATA, MANIFEST = make_pack(30_000)

_WORKER = """
import hashlib, json, sys
from torchrelay.transfer.arena.mapped_slab import MappedSlab
slab = MappedSlab(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
for line in sys.stdin:
    print(json.dumps({
        "verified": [index for index in range(slab.num_chunks) if slab.is_verified(index)],
        "num_verified": slab.num_verified,
        "complete": slab.complete,
        "sha256": hashlib.sha256(slab.data).hexdigest(),
        "read_only": slab.data.readonly,
        "num_bytes": slab.manifest.num_bytes
    }), flush=True)
slab.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def slab(path: Path) -> Iterator[Slab]:
    arena = Arena.create(path, TABLE_BYTES + (1 << 20))
    arena.reserve(make_pack(5_000, seed=9)[1].encode())  # so that the slab is not the first
    yield arena.reserve(MANIFEST.encode())
    arena.check_integrity()
    arena.close(unlink=True)


def put(slab: Slab, index: int) -> None:
    span = slab.manifest.chunk_range(index)
    slab.chunk(index)[:] = DATA[span.begin : span.end]
    slab.accept(index)


def test_accepted_chunks_count_once(slab: Slab) -> None:
    for index in (2, 0, 0, 1):
        put(slab, index)
    assert slab.num_verified == 3
    assert not slab.complete
    assert slab.missing() == [3, 4, 5, 6, 7]
    assert slab.wait_any(range(4), 0.0) == [0, 1, 2]


def test_waiters_wake_at_once(slab: Slab) -> None:
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(slab.wait_any([5], 10.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    put(slab, 5)
    for thread in threads:
        thread.join()
    assert results == [[5], [5], [5]]


def test_chunk_published_during_scan_keeps_order(slab: Slab) -> None:
    assert slab.wait_any(Interrupted(range(3), lambda index: put(slab, index)), 1.0) == [0, 1, 2]


def test_failed_slab_can_be_refilled(slab: Slab) -> None:
    put(slab, 0)
    slab.fail("every source is gone")
    assert "every source is gone" in slab.error
    assert slab.wait_any([0], 0.0) == [0], "what is verified stays good"
    with pytest.raises(BufferLost, match="every source is gone"):
        slab.wait_any([1], 10.0)
    slab.revive()
    assert slab.error == ""
    assert slab.wait_any([1], 0.0) == []


def test_other_process_maps_slab_read_only(slab: Slab, path: Path) -> None:
    arguments = [str(path), str(slab.offset), str(slab.num_slab_bytes)]
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def ask() -> dict[str, object]:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("now\n")
            worker.stdin.flush()
            answer: dict[str, object] = json.loads(worker.stdout.readline())
            return answer

        assert ask()["num_verified"] == 0
        put(slab, 1)
        assert ask()["verified"] == [1]
        for index in range(slab.num_chunks):
            put(slab, index)
        last = ask()
        assert last["complete"] is True
        assert last["read_only"] is True
        assert last["num_bytes"] == len(DATA)
        assert last["sha256"] == hashlib.sha256(DATA).hexdigest()
        worker.stdin.close()
        assert worker.wait(HANG_S) == 0


def test_mapping_outlives_pack_and_close(slab: Slab, path: Path) -> None:
    for index in range(slab.num_chunks):
        put(slab, index)
    view = MappedSlab(path, slab.offset, slab.num_slab_bytes)
    assert view.data == DATA
    array, tensor = np.frombuffer(view.data, dtype=np.uint8), as_tensor(view.data)
    assert not array.flags.writeable
    with pytest.raises(TypeError):
        view.data[0] = 1
    view.close()
    view.close()
    assert array[17] == DATA[17]
    del array
    gc.collect()
    view.close()
    assert bytes(tensor.tolist()) == DATA
    del tensor, view
    gc.collect()


def test_other_file_not_mapped_as_slab(slab: Slab, path: Path) -> None:
    with pytest.raises(NotFound):
        MappedSlab(path.with_name("nowhere"), slab.offset, slab.num_slab_bytes)
    for offset, num_bytes in [(slab.offset + 1, 4096), (slab.offset, 0), (slab.offset, 1 << 30), (-4096, 4096)]:
        with pytest.raises(ArenaCorrupted):
            MappedSlab(path, offset, num_bytes)
    with pytest.raises(ArenaCorrupted):
        MappedSlab(path, slab.offset + slab.format.data_offset, 4096)
    with pytest.raises(ArenaCorrupted):
        MappedSlab(path, slab.offset, slab.num_slab_bytes - 4096)


def test_integrity_check_finds_false_verified_bytes(slab: Slab, path: Path) -> None:
    put(slab, 0)
    with path.open("r+b", buffering=0) as file:
        for mark, reason in [(0, "hides"), (7, "neither")]:
            file.seek(slab.offset + slab.format.verified.start)
            file.write(bytes([mark]))
            with pytest.raises(ArenaCorrupted, match=reason):
                slab.check_integrity()
        file.seek(slab.offset + slab.format.verified.start)
        file.write(b"\x01")
