"""Usage by hour: sums of ledger rows, written in the transaction that writes the rows.

Reports add these sums instead of the rows, of which a month may have millions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import usage_hours

HOUR_US = 3_600_000_000
GROUP = tuple(column.name for column in usage_hours.primary_key)
SUMS = tuple(column.name for column in usage_hours.c if not column.primary_key)


def hour_of(unix_us: int) -> int:
    """The begin of the hour (UTC)."""
    return unix_us - unix_us % HOUR_US


def hour_sums(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sums of ledger rows, by column names: a row of ``usage_hours`` per group, in the order of their keys.

    A request counts in its first row, which the sweep or its gateway wrote.
    """
    sums: defaultdict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        counted = {**row, "hour_unix_us": hour_of(row["settled_unix_us"])}
        counted["num_requests"] = int(row["choice"] == 0 and row["supplement"] == 0)
        sums[tuple(counted[name] for name in GROUP)].update({name: counted[name] for name in SUMS})
    return [dict(zip(GROUP, key, strict=True)) | sums[key] for key in sorted(sums)]


def add_to_hours(database: Database) -> Any:
    """The statement that adds one row of ``hour_sums``. Rows in their order never deadlock two gateways."""
    new = database.insert(usage_hours)
    more = {name: usage_hours.c[name] + new.excluded[name] for name in SUMS}
    return new.on_conflict_do_update(index_elements=GROUP, set_=more)
