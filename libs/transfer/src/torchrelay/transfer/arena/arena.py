"""The host arena: one prefaulted shared-memory file per host that holds all packs.

    reserve -> filling (pinned by its filler) -> complete -> unpinned -> evicted by a later reserve, or dropped

One process, the store, owns the arena; workers map single slabs read-only. Released ranges are reused, never returned
to the system. The table is in the file, so a new process finds complete and partial slabs again. These are pinned by
``RECOVERED`` until the workers that may map them have reported, and their chunks are hashed again at first use.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from pathlib import Path

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.file_locks import is_range_locked
from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.arena.arena_file import is_at, open_locked
from torchrelay.transfer.arena.prefault import prefault
from torchrelay.transfer.arena.range_allocator import Allocation, UsedRange, find_space
from torchrelay.transfer.arena.retention import RetentionLease
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.arena.slab_format import ALIGN_BYTES, SlabFormat, page_aligned
from torchrelay.transfer.arena.slab_table import MAX_SLABS, TABLE_BYTES, SlabTable, TableEntry, check_ranges
from torchrelay.transfer.errors import ArenaCorrupted, ArenaFull, ProtocolViolation, UnknownBuffer
from torchrelay.transfer.manifest import checked_manifest, pack_id_of

__all__ = ["RECOVERED", "Arena", "ArenaFull"]

RECOVERED = "recovered"  # pins the packs of an earlier process until no process maps them any more
GROW_SLICE_BYTES = 64 << 20  # prefaulted per step; growth can stop between steps
log = get_logger(__name__)


class Arena:
    """The arena; open it with ``create``. Thread-safe."""

    def __init__(self, path: Path, file: int, mapping: mmap.mmap, grow_slice_bytes: int) -> None:
        self.path = path
        self._file, self._grow_slice_bytes = file, grow_slice_bytes
        self._mapping = mapping
        self._memory = memoryview(mapping)
        self.capacity_bytes = len(mapping)  # the maximum size, including the table
        self._table = SlabTable(self._memory)
        self._entries: dict[str, TableEntry] = {}
        self._slabs: dict[str, Slab] = {}
        self._pins: dict[str, set[str]] = {}
        self.retention = RetentionLease()
        self.num_evictions = 0
        self._tick, self._drop_when_unpinned = 0, set[str]()  # packs to drop with their last pin
        self._closed = self._growth_ended = False
        self._lock = threading.RLock()
        self._growing = threading.Lock()

    @classmethod
    def create(cls, path: str | Path, capacity_bytes: int, grow_slice_bytes: int = GROW_SLICE_BYTES) -> Arena:
        """Opens the arena at ``path`` (normally under /dev/shm), or creates it: sparse, only its table prefaulted.

        Replaces a file of another size or version; workers that map the old file keep it. Raises ``Conflict`` when
        another process owns the arena, ``ArenaFull`` when the file system has no space for the table.
        """
        path, capacity_bytes = Path(path), capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        if capacity_bytes <= TABLE_BYTES:
            raise InvalidRequest(f"an arena must have more than {TABLE_BYTES} bytes", field="arena_bytes")
        file = open_locked(path, capacity_bytes)
        try:
            os.ftruncate(file, capacity_bytes)
            os.posix_fallocate(file, 0, TABLE_BYTES)
            arena = cls(path, file, mmap.mmap(file, capacity_bytes), grow_slice_bytes)
        except OSError as error:
            os.close(file)
            raise ArenaFull(f"the arena {path} cannot be created: {error.strerror}") from error
        if arena._table.faulted_bytes:
            try:
                arena._recover()
            except ArenaCorrupted as error:  # start with an empty arena rather than not at all
                log.warning("arena_not_recovered", reason=error.message)
                arena.close(unlink=True)
                return cls.create(path, capacity_bytes, grow_slice_bytes)
        else:
            arena._table.format(arena.capacity_bytes)
            arena._table.faulted_bytes = TABLE_BYTES
        return arena

    @property
    def faulted_bytes(self) -> int:
        """The prefaulted size, including the table."""
        return self._table.faulted_bytes

    @property
    def free_bytes(self) -> int:
        """The bytes that no slab occupies, prefaulted or not; evictable packs count as occupied."""
        with self._lock:
            return self.capacity_bytes - TABLE_BYTES - sum(entry.num_bytes for entry in self._entries.values())

    def grow(self, num_bytes: int) -> int:
        """Prefaults the next ``num_bytes``, up to the capacity; returns ``faulted_bytes``.

        Takes seconds per GB without blocking other calls. Raises ``ArenaFull`` when the system is out of memory.
        """
        with self._growing:
            target = min(self.faulted_bytes + page_aligned(num_bytes), self.capacity_bytes)
            while (begin := self.faulted_bytes) < target:
                if self._growth_ended:
                    raise ArenaFull(f"the arena stays at {begin} bytes: it is about to be closed")
                step = min(self._grow_slice_bytes, target - begin)
                try:
                    prefault(self._file, self._mapping, begin, step)
                except OSError as error:
                    raise ArenaFull(f"the arena cannot grow beyond {begin} bytes: {error.strerror}") from error
                self._table.faulted_bytes = begin + step
            return self.faulted_bytes

    def stop_growing(self) -> None:
        """Ends a running ``grow`` after its step; later calls raise ``ArenaFull``. It makes ``close`` quick."""
        self._growth_ended = True

    def reserve(self, encoded_manifest: bytes, owner: str | None = None, keep_retained: bool = False) -> Slab:
        """Returns the pack's slab, existing or new and empty, pinned by ``owner`` if given.

        Grows the arena when the prefaulted range has no space but the capacity has; otherwise evicts the least recently
        used unpinned packs. Retained packs are evicted last, with ``keep_retained`` never. A failed slab may be filled
        again.
        Raises ``ArenaFull``, and ``ProtocolViolation`` for a bad manifest.
        """
        pack_id = pack_id_of(encoded_manifest)
        form = SlabFormat.of(checked_manifest(encoded_manifest), len(encoded_manifest))
        end_bytes = self.capacity_bytes
        while True:
            with self._lock:
                num_missing_bytes = 0
                slab = self.get(pack_id)
                if slab is None:
                    allocation = self._find_space(pack_id, form.num_slab_bytes, end_bytes, keep_retained)
                    num_missing_bytes = allocation.begin + form.num_slab_bytes - self.faulted_bytes
                    if num_missing_bytes <= 0:
                        slab = self._place(pack_id, allocation, form, encoded_manifest)
                if slab is not None:
                    self._drop_when_unpinned.discard(pack_id)
                    slab.revive()
                    if owner is not None:
                        self.lease(slab, owner)
                    return slab
            try:
                self.grow(num_missing_bytes)  # without the lock: other calls continue meanwhile
            except ArenaFull:
                end_bytes = self.faulted_bytes  # no more memory: only eviction can free space

    def get(self, pack_id: str) -> Slab | None:
        """The pack's slab, complete or not; counts as a use."""
        with self._lock:
            slab = self._slabs.get(pack_id)
            if slab is not None:
                self._entries[pack_id] = self._table.touch(self._entries[pack_id], self._next_tick())
            return slab

    def slabs(self) -> list[Slab]:
        """All slabs, by offset."""
        with self._lock:
            return sorted(self._slabs.values(), key=lambda slab: slab.offset)

    def is_mapped(self, slab: Slab) -> bool:
        """Whether a worker maps the slab: any process of the host, in any container."""
        return is_range_locked(self._file, slab.offset, slab.num_slab_bytes)

    def pin(self, pack_id: str, owner: str) -> None:
        """Prevents eviction and drops of the pack until this owner unpins it. Raises ``UnknownBuffer``."""
        with self._lock:
            if self.get(pack_id) is None:
                raise UnknownBuffer(f"pack {pack_id} is not in the arena")
            self._pins.setdefault(pack_id, set()).add(owner)

    def lease(self, slab: Slab, owner: str) -> None:
        """Pins this slab for a reader. Raises ``UnknownBuffer`` once it has been dropped."""
        with self._lock:
            if self._slabs.get(slab.pack_id) is not slab:
                raise UnknownBuffer(f"pack {slab.pack_id} is no longer in the arena")
            self.pin(slab.pack_id, owner)

    def unpin(self, pack_id: str, owner: str) -> None:
        """Removes this owner's pin, if there is one."""
        with self._lock:
            owners = self._pins.get(pack_id, set())
            owners.discard(owner)
            if not owners:
                self._pins.pop(pack_id, None)
                if pack_id in self._drop_when_unpinned and not self._closed:
                    self._remove(pack_id)
            if owner != RECOVERED:  # releasing a recovered pack is not a use: the eviction order stays
                self.get(pack_id)

    def owners(self, pack_id: str) -> frozenset[str]:
        """The owners of the pack's pins."""
        with self._lock:
            return frozenset(self._pins.get(pack_id, ()))

    def drop(self, pack_id: str, when_unpinned: bool = False) -> bool:
        """Frees an unpinned pack's range. False: absent or pinned; ``when_unpinned``: its last unpin drops it."""
        with self._lock:
            if pack_id in self._slabs and pack_id not in self._pins:
                self._remove(pack_id)
                return True
            if when_unpinned and pack_id in self._slabs:
                self._drop_when_unpinned.add(pack_id)
            return False

    def check_integrity(self) -> None:
        """Raises ``ArenaCorrupted`` when slabs overlap or are out of range, or the table disagrees with them."""
        with self._lock:
            if set(self._table.entries()) != set(self._entries.values()):
                raise ArenaCorrupted("the arena's table differs from what this process wrote")
            pinned = self._pins.keys() | self._drop_when_unpinned
            if self._entries.keys() != self._slabs.keys() or not pinned <= self._slabs.keys():
                raise ArenaCorrupted("slabs, table and pins name different packs")
            check_ranges(list(self._entries.values()), self.faulted_bytes, self.capacity_bytes)
            for slab in self._slabs.values():
                entry = self._entries[slab.pack_id]
                if (slab.offset, slab.num_slab_bytes) != (entry.begin, entry.num_bytes):
                    raise ArenaCorrupted(f"pack {slab.pack_id} is not where the table says")
                slab.check_integrity()

    def close(self, unlink: bool = False) -> None:
        """Ends every wait with ``BufferLost`` and closes the file; ``unlink`` removes it.

        Memory that is still referred to stays mapped until its last view is collected.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = self._growth_ended = True
            for slab in self._slabs.values():
                slab.mark_dropped()
            self._slabs.clear()
        with self._growing:  # after the slice that is being prefaulted
            if unlink and is_at(self.path, self._file):
                self.path.unlink()
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def _find_space(self, pack_id: str, num_bytes: int, end_bytes: int, keep_retained: bool) -> Allocation:
        if self._closed:
            raise ArenaFull("the arena is closed")
        ranks, used = self.retention.ranks, []
        for entry in self._entries.values():
            rank = ranks.get(entry.pack_id)
            kept = entry.pack_id in self._pins or (keep_retained and rank is not None)
            last_used = entry.last_used if rank is None else self._tick + 1 + rank  # retained packs are evicted last
            used.append(UsedRange(entry.pack_id, entry.begin, entry.end, last_used, kept))
        allocation = find_space(used, TABLE_BYTES, self.faulted_bytes, end_bytes, num_bytes)
        if allocation is None:
            pinned = sum(taken.end - taken.begin for taken in used if taken.pinned)
            raise ArenaFull(
                f"pack {pack_id} needs {num_bytes} contiguous bytes; "
                f"of the arena's {end_bytes} bytes {pinned} are pinned{' or retained' if keep_retained else ''}",
                field="arena_bytes",
            )
        return allocation

    def _place(self, pack_id: str, allocation: Allocation, form: SlabFormat, encoded_manifest: bytes) -> Slab:
        if len(self._entries) - len(allocation.evicted) >= MAX_SLABS:
            raise ArenaFull(f"the arena's table has no entry left: it holds {MAX_SLABS} packs")
        for evicted in allocation.evicted:
            self._remove(evicted)
        self.num_evictions += len(allocation.evicted)
        memory = self._memory[allocation.begin : allocation.begin + form.num_slab_bytes]
        form.write(memory, encoded_manifest)
        slab = Slab(self, memory, allocation.begin, pack_id)
        self._entries[pack_id] = self._table.add(pack_id, allocation.begin, form.num_slab_bytes, self._next_tick())
        self._slabs[pack_id] = slab
        return slab

    def _remove(self, pack_id: str) -> None:
        self._drop_when_unpinned.discard(pack_id)
        self._table.remove(self._entries.pop(pack_id))
        self._slabs.pop(pack_id).mark_dropped()

    def _recover(self) -> None:
        for entry in sorted(self._table.entries(), key=lambda entry: entry.begin):
            self._tick = max(self._tick, entry.last_used)
            try:
                check_ranges([*self._entries.values(), entry], self.faulted_bytes, self.capacity_bytes)
                slab = Slab(self, self._memory[entry.begin : entry.end], entry.begin, entry.pack_id)
                if slab.num_slab_bytes != entry.num_bytes or pack_id_of(slab.head) != entry.pack_id:
                    raise ArenaCorrupted(f"the slab of pack {entry.pack_id} holds something else")
            except (ArenaCorrupted, ProtocolViolation) as error:
                log.warning("slab_not_recovered", pack_id=entry.pack_id, reason=error.message)
                self._table.remove(entry)
                continue
            self._entries[entry.pack_id] = entry
            self._slabs[entry.pack_id] = slab
            self._pins[entry.pack_id] = {RECOVERED}
