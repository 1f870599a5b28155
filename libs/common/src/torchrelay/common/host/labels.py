"""Labels of hosts, as ``KEY=VALUE``: a model may require them of the hosts of its instances."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

MAX_LABELS: Final = 16  # of a host, and required by a model
_KEY, _VALUE = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}", r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
_LABEL: Final = re.compile(f"{_KEY}={_VALUE}")


def checked_labels(labels: Iterable[str]) -> list[str]:
    """The labels, sorted. Raises ``ValueError`` with a sentence."""
    distinct = sorted(set(labels))
    if len(distinct) > MAX_LABELS:
        raise ValueError(f"at most {MAX_LABELS} labels, not {len(distinct)}")
    for label in distinct:
        if not _LABEL.fullmatch(label):
            raise ValueError(f"{label[:140]!r} is not a label; write KEY=VALUE, such as zone=a")
    if twice := _key_of_two(distinct):
        raise ValueError(f"{twice} has two values; a host has one value per key")
    return distinct


def _key_of_two(labels: Sequence[str]) -> str:
    keys = [label.partition("=")[0] for label in labels]
    return next((key for key in keys if keys.count(key) > 1), "")
