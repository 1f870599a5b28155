"""The rota ends: every turn brings a chunk or costs a strike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transfer.relay_parts import source_at
from torchrelay.transfer.errors import BufferLost, ChunkDamaged, TicketExpired, UnknownBuffer
from torchrelay.transfer.sources import MAX_STRIKES, Rota

A, B = (source_at("127.0.0.1:1", "pack", holder_id=name) for name in ("host-a", "host-b"))


def test_the_first_source_stays_until_it_fails() -> None:
    rota = Rota([A, B])
    rota.progressed()
    assert rota.current() is A
    rota.failed(OSError("gone"))
    assert rota.current() is B


def test_a_broken_source_gets_a_second_chance_a_refusing_one_does_not() -> None:
    rota = Rota([A, B])
    rota.failed(ChunkDamaged("chunk 3"))
    rota.failed(TicketExpired("too late"))
    assert rota.current() is A
    rota.failed(ChunkDamaged("chunk 3"))
    assert rota.current() is None
    assert [holder_id for holder_id, _ in rota.failures] == ["host-a", "host-b", "host-a"]
    for final in (UnknownBuffer("no"), BufferLost("no")):
        lonely = Rota([A])
        lonely.failed(final)
        assert lonely.current() is None


def test_no_source_at_all() -> None:
    assert Rota([]).current() is None


@given(num_sources=st.integers(1, 4), outcomes=st.lists(st.booleans(), max_size=60))
def test_failures_are_bounded_by_progress(num_sources: int, outcomes: list[bool]) -> None:
    rota = Rota([A] * num_sources)
    num_chunks = 0
    for progressed in outcomes:
        if rota.current() is None:
            break
        if progressed:
            rota.progressed()
            num_chunks += 1
        else:
            rota.failed(OSError("gone"))
    assert len(rota.failures) <= num_sources * MAX_STRIKES + num_chunks * MAX_STRIKES
