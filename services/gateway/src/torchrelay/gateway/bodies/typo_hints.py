"""Finds names one edit away from a known one. Pure."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

MIN_CHARS = 4  # nearly everything is one edit away from shorter names
MAX_UNKNOWN = 32  # names of a body that are examined


def typo_hint(given: Collection[str], known: Collection[str], ignored: Collection[str] = ()) -> tuple[str, str] | None:
    """The first unknown name of ``given`` that is one edit away from a known one, with that one, if any.

    Known names that are given too do not count: beside ``stop``, ``stops`` is somebody's extension. Nor do names of
    ``ignored``, which are known to have no effect.
    """
    # Not difflib: a cutoff that accepts swaps in short names ("modle") rejects other servers' fields (min_tokens).
    unknown = list(islice((name for name in given if name not in known and name not in ignored), MAX_UNKNOWN))
    if not unknown:
        return None
    missing = [name for name in known if name not in given and len(name) >= MIN_CHARS]
    return next(((name, other) for name in unknown for other in missing if is_one_edit_away(name, other)), None)


def is_one_edit_away(name: str, other: str) -> bool:
    """Whether one insertion, deletion, substitution or swap of neighbours turns ``name`` into ``other``."""
    if abs(len(name) - len(other)) > 1 or name == other:
        return False
    differ = next((place for place, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), None)
    if differ is None:  # one is the other plus one letter
        return True
    rest, other_rest = name[differ:], other[differ:]
    swapped = rest[:2] == other_rest[:2][::-1] and rest[2:] == other_rest[2:]
    return swapped or rest[1:] == other_rest[1:] or rest[1:] == other_rest or rest == other_rest[1:]
