"""At which rate each target can be filled when all are filled at once.

Everybody takes chunks in one order, so a host can feed whoever is behind it, and only those: hosts stand in a line,
the fastest first, and the rates of the first k together are at most what the sources and the first k - 1 send. Among
all rates that keep to this the fairest are taken: each target gets all that its link takes in, or else the *level*, the
highest rate that everyone with a faster link can have. For the slowest target, hence for the time until all are
filled, nothing better exists, except that the last in the line sends to nobody; Mutualcast (Li, Chou, Zhang 2005)
reaches the bound by the same sharing of uplinks, without the order of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ROUNDS = 24  # of halving: the level is found to a millionth
_SLACK = 1 + 1e-9


class ChainMember(NamedTuple):
    """A place in the line. ``takes`` is 0 for a host that is being fed already."""

    into: float  # the rate at which it can be ahead of others
    out: float
    takes: int = 1


def fair_rate(sent: float, members: Sequence[ChainMember]) -> float:
    """The level, bytes per second. ``sent``: what the whole holders send; ``runners``: by ``into``, fastest first."""
    highest = members[0].into
    if _feasible(highest, sent, members):
        return highest
    low, high = 0.0, highest
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if _feasible(middle, sent, members):
            low = middle
        else:
            high = middle
    return low


def _feasible(rate: float, sent: float, members: Sequence[ChainMember]) -> bool:
    """Whether everyone can have this rate, or what its link takes in where that is less."""
    taken, given, least_out, first = 0.0, sent, float("inf"), sent
    num = 0
    for member in members:
        if member.into < rate:
            break
        num += 1
        given += member.out
        if member.takes:
            taken += rate
            least_out = min(least_out, member.out)
        else:
            first += member.out  # it stands before all targets of this rate
    # Those at the level stand with the largest senders first, so that only the ends of their part can fail.
    if taken and (rate > first * _SLACK or taken > (given - least_out) * _SLACK):
        return False
    for index in range(num, len(members)):
        member = members[index]
        if member.takes:
            taken += member.into
            if taken > given * _SLACK:
                return False
        given += member.out
    return True
