"""The chain of seven with a fault half-way: a store dies, a link drops all packets, a link slows down."""

from __future__ import annotations

from collections.abc import Callable

from bench.data_plane.figures import FigureTable
from bench.data_plane.lab import MB, RATE_MBIT, SOURCE, TARGETS, Filled, RelayLab
from tests.lab.raw_pack import RawPack

MIDDLE = "h4"
_STRIPED = "h3"


def measure_kill(relays: RelayLab, table: FigureTable, pack: RawPack, undisturbed_s: float) -> None:
    """Kills the middle store when it has half of the pack; measures the others' time."""
    filled = _disturbed(relays, pack, relays.stores.children[MIDDLE].kill, spared=(MIDDLE,))
    _note(table, "repair_kill", filled, undisturbed_s)
    _renew(relays, pack)


def measure_silent(relays: RelayLab, table: FigureTable, pack: RawPack, undisturbed_s: float) -> None:
    """Drops every packet to and from the middle host from half-way on; measures the others' time."""
    middle = relays.lab[MIDDLE]
    try:
        filled = _disturbed(relays, pack, middle.cut, spared=(MIDDLE,))
    finally:
        middle.restore()
    _note(table, "repair_silent", filled, undisturbed_s)
    _renew(relays, pack)


def measure_slow(relays: RelayLab, table: FigureTable, pack: RawPack, undisturbed_s: float) -> None:
    """Limits the middle host's egress to a quarter from half-way on; measures the time of all hosts."""
    middle = relays.lab[MIDDLE]
    try:
        filled = _disturbed(relays, pack, lambda: middle.set_rate(outgoing_mbit=RATE_MBIT / 4))
    finally:
        middle.set_rate(outgoing_mbit=RATE_MBIT)
    _note(table, "repair_slow", filled, undisturbed_s)
    relays.stores.drop(TARGETS, pack)


def measure_striping(relays: RelayLab, table: FigureTable, pack: RawPack) -> None:
    """Measures a fetch from two complete holders whose links send at half the target's rate."""
    holders = (SOURCE, TARGETS[0])
    limit = relays.iperf3_bytes_per_s(SOURCE, TARGETS[0])
    relays.begin([relays.stores.relay(TARGETS[0], pack, [SOURCE])])
    relays.await_filled([TARGETS[0]], pack)
    try:
        for holder in holders:
            relays.lab[holder].set_rate(outgoing_mbit=RATE_MBIT / 2)
        rate = pack.num_bytes / relays.fill_one(_STRIPED, pack, holders, num_striped=2).took_s
    finally:
        for holder in holders:
            relays.lab[holder].set_rate(outgoing_mbit=RATE_MBIT)
        relays.stores.drop([TARGETS[0]], pack)
    table.note("striping", rate / limit, f"{rate / MB:.1f} MB/s, iperf3 at the target's rate {limit / MB:.1f} MB/s")


def _disturbed(relays: RelayLab, pack: RawPack, disturb: Callable[[], None], spared: tuple[str, ...] = ()) -> Filled:
    def at_half() -> None:
        relays.await_half(MIDDLE, pack)
        disturb()

    return relays.chain(pack, at_half, spared)


def _note(table: FigureTable, name: str, filled: Filled, undisturbed_s: float) -> None:
    against = f"{filled.took_s:.3f} s over undisturbed {undisturbed_s:.3f} s, {filled.num_repairs} repairs"
    table.note(name, filled.took_s / undisturbed_s, against)


def _renew(relays: RelayLab, pack: RawPack) -> None:
    """Restarts the middle store and empties all."""
    relays.stores.restart(MIDDLE, keep_arena=False)
    relays.stores.drop(TARGETS, pack)
