"""Windows, stealing, and who writes a chunk that several sources deliver."""

from __future__ import annotations

from tests.unit.transfer.fetch.simulated_sources import CHUNK_BYTES, SimulatedSource, TransferCore, opened, transfer
from torchrelay.transfer.fetch.chunk_assignment import MAX_WINDOW, MIN_WINDOW

RATE = 50e6
NUM_CHUNKS = 256
UNDISTURBED_S = NUM_CHUNKS * CHUNK_BYTES / RATE  # 1.34


def test_windows_follow_rate() -> None:
    sizes: dict[float, int] = {}
    for rate in (2e6, RATE, 5e9):

        def look(now: float, core: TransferCore, rate: float = rate) -> None:
            sizes[rate] = max(sizes.get(rate, 0), len(core.states[0].outstanding) if now > 0.2 else 0)

        transfer([SimulatedSource(rate)], int(rate / CHUNK_BYTES / 2) + 4, at=look)
    assert sizes[2e6] <= MIN_WINDOW
    assert 5 <= sizes[RATE] <= 12
    assert sizes[5e9] == MAX_WINDOW


def test_missing_chunks_are_requested_from_other_source() -> None:
    first, second = SimulatedSource(RATE / 2, holds=40), SimulatedSource(RATE / 2)
    transfer([first, second], 80, num_striped=2)
    assert len(first.received) >= 15
    assert max(first.received) < 40


def test_slow_partner_does_not_delay_end() -> None:
    sources = [SimulatedSource(RATE * 0.95), SimulatedSource(RATE * 0.05)]
    _, took_s = transfer(sources, NUM_CHUNKS, num_striped=2)
    assert took_s < 1.08 * UNDISTURBED_S
    assert len(sources[1].received) >= 0.02 * NUM_CHUNKS


def test_second_copy_of_chunk_skipped() -> None:
    core = opened(4, 2, num_striped=2)
    core.assignment.ask(0, core.assignment.requests(0).wanted, 0.0)
    assert core.assignment.begin(0, 0, 0.0)
    assert not core.assignment.begin(1, 0, 0.0)
    core.assignment.accepted(0, 0, 10, 0.1)
    assert not core.assignment.begin(1, 0, 0.2)
    assert core.assignment.num_left == 3


def test_chunk_arriving_after_cancellation_counts() -> None:
    core = opened(2, 2, num_striped=2)
    first, second = core.assignment.requests(0).wanted, core.assignment.requests(1).wanted
    assert (first, second) == ([0, 1], [])
    core.assignment.ask(0, first, 0.0)
    core.assignment.ask(1, [1], 0.0)  # as after a steal
    assert core.assignment.begin(0, 1, 0.1)
    assert core.assignment.requests(1).cancelled == [1]
