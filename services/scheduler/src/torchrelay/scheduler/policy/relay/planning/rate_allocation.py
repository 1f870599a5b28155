"""The fair rates of targets that are fed at the same time.

All receive the chunks in one order, so a host can feed only hosts behind it: they form a chain, the fastest first, and
the rates of the first k add up to at most what the sources and the first k - 1 send. Among all such rates the max-min
fair ones are chosen: each target gets what its link takes in, or else the *fair rate*, the highest that all targets
with faster links can have. For the slowest target, hence for the time until all are complete, this is optimal, except
that the last of the chain sends to nobody; Mutualcast (Li, Chou, Zhang 2005) reaches the bound by the same sharing of
uplinks, without an order of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ROUNDS = 24  # of bisection: exact to less than a millionth
_SLACK = 1 + 1e-9


class ChainMember(NamedTuple):
    """A host of the chain. ``takes``: 0 if it is being fed already."""

    into: float  # its incoming rate, which bounds what it can pass on
    out: float
    takes: int = 1


def fair_rate(sent: float, members: Sequence[ChainMember]) -> float:
    """Bytes per second. ``sent``: what the whole holders send; ``members``: by ``into``, the fastest first."""
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
    """Whether all can have this rate, or what their link takes in if that is less."""
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
            first += member.out  # it comes before all targets of this rate
    # Targets of this rate are ordered by outgoing rate, so only the ends of their part of the chain can fail.
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
