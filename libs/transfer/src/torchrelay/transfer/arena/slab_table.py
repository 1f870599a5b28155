"""The arena's table of slabs: the first pages of its file, so that it outlives the store.

[header 64 B][entry 64 B]...    an entry is valid once its state, which is written last, is USED
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchrelay.transfer.arena.slab_format import ALIGN_BYTES, page_aligned
from torchrelay.transfer.errors import ArenaCorrupted, ArenaFull

MAX_SLABS = 1023
_MAGIC = b"TRARENA1"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, entries, capacity, faulted bytes
_FAULTED = struct.Struct("<Q")
_FAULTED_OFFSET = 24
_ENTRY = struct.Struct("<IIQQQ32s")  # state, unused, offset, bytes, last used, pack id
_STATE = struct.Struct("<I")
_LAST_USED = struct.Struct("<Q")
_LAST_USED_OFFSET = 24
_SIZE = 64
_FREE, _USED = 0, 1
TABLE_BYTES = page_aligned(_SIZE * (MAX_SLABS + 1))


@dataclass(frozen=True, slots=True)
class TableEntry:
    """The pack in [begin, begin + num_bytes) of the arena; ``last_used`` is a tick of a clock that counts uses."""

    slot: int
    pack_id: str
    begin: int
    num_bytes: int
    last_used: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


def is_table_of(front: bytes, capacity_bytes: int) -> bool:
    """Whether a file that begins with ``front`` is an arena of this version and size."""
    return front[:_FAULTED_OFFSET] == _HEADER.pack(_MAGIC, _VERSION, MAX_SLABS, capacity_bytes, 0)[:_FAULTED_OFFSET]


def check_ranges(entries: Iterable[TableEntry], faulted_bytes: int, capacity_bytes: int) -> None:
    """Raises ``ArenaCorrupted`` when slabs overlap, or are outside the prefaulted range."""
    if not TABLE_BYTES <= faulted_bytes <= capacity_bytes:
        raise ArenaCorrupted(f"the arena's table claims {faulted_bytes} prefaulted bytes of {capacity_bytes}")
    free_from = TABLE_BYTES
    for entry in sorted(entries, key=lambda entry: entry.begin):
        if entry.begin % ALIGN_BYTES or entry.num_bytes % ALIGN_BYTES or entry.num_bytes <= 0:
            raise ArenaCorrupted(f"pack {entry.pack_id} is not page aligned")
        if entry.begin < free_from or entry.end > faulted_bytes:
            raise ArenaCorrupted(f"pack {entry.pack_id} overlaps another or is out of range")
        free_from = entry.end


class SlabTable:
    """The table in the arena's memory. Its owner's lock guards it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory[:TABLE_BYTES]

    def format(self, capacity_bytes: int) -> None:
        """Writes an empty table."""
        self._memory[:] = bytes(TABLE_BYTES)
        _HEADER.pack_into(self._memory, 0, _MAGIC, _VERSION, MAX_SLABS, capacity_bytes, 0)

    @property
    def faulted_bytes(self) -> int:
        return int(_FAULTED.unpack_from(self._memory, _FAULTED_OFFSET)[0])

    @faulted_bytes.setter
    def faulted_bytes(self, num_bytes: int) -> None:
        _FAULTED.pack_into(self._memory, _FAULTED_OFFSET, num_bytes)

    def entries(self) -> list[TableEntry]:
        """All used entries. Raises ``ArenaCorrupted`` for an unknown state."""
        entries = []
        for slot in range(MAX_SLABS):
            state, _, begin, num_bytes, last_used, pack_id = _ENTRY.unpack_from(self._memory, _entry_offset(slot))
            if state == _USED:
                entries.append(TableEntry(slot, pack_id.hex(), begin, num_bytes, last_used))
            elif state != _FREE:
                raise ArenaCorrupted(f"entry {slot} of the arena's table has state {state}")
        return entries

    def add(self, pack_id: str, begin: int, num_bytes: int, last_used: int) -> TableEntry:
        """Writes a new entry. Raises ``ArenaFull`` when every entry is used."""
        for slot in range(MAX_SLABS):
            offset = _entry_offset(slot)
            if _STATE.unpack_from(self._memory, offset)[0] == _FREE:
                _ENTRY.pack_into(self._memory, offset, _FREE, 0, begin, num_bytes, last_used, bytes.fromhex(pack_id))
                _STATE.pack_into(self._memory, offset, _USED)
                return TableEntry(slot, pack_id, begin, num_bytes, last_used)
        raise ArenaFull(f"the arena's table has no entry left: it holds {MAX_SLABS} packs")

    def touch(self, entry: TableEntry, last_used: int) -> TableEntry:
        _LAST_USED.pack_into(self._memory, _entry_offset(entry.slot) + _LAST_USED_OFFSET, last_used)
        return replace(entry, last_used=last_used)

    def remove(self, entry: TableEntry) -> None:
        _STATE.pack_into(self._memory, _entry_offset(entry.slot), _FREE)


def _entry_offset(slot: int) -> int:
    return _SIZE * (slot + 1)
