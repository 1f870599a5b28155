"""Results of batches' lines, each of which is kept once, in the transaction that bills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, select, tuple_

from torchrelay.common.errors import Conflict
from torchrelay.gateway.core import LineResult
from torchrelay.gateway.sql.tables import batch_results, batches

TAKES_RESULTS = "in_progress"  # the status of a batch whose lines run


class LineLost(Conflict):
    """A result that is not kept, and therefore not billed."""


def keep_results(connection: Connection, insert: Any, results: Sequence[LineResult]) -> None:
    """Inserts the results whose lines have none and whose batch runs. ``insert`` leaves a present row as it is."""
    # Locked, so that a batch that ends does so before or after this transaction. Sorted, so that two gateways never
    # deadlock on each other's rows.
    ids = sorted({result.batch_id for result in results})
    running = select(batches.c.batch_id).where(batches.c.batch_id.in_(ids), batches.c.status == TAKES_RESULTS)
    taking = set(connection.execute(running.order_by(batches.c.batch_id).with_for_update(read=True)).scalars())
    rows = [asdict(result) for result in results if result.batch_id in taking]
    rows.sort(key=lambda row: (row["batch_id"], row["line"]))
    if rows:
        connection.execute(insert, rows)


def kept_ids(connection: Connection, results: Sequence[LineResult]) -> set[str]:
    """The request ids of those of ``results`` that are kept."""
    lines = [(result.batch_id, result.line) for result in results]
    rows = batch_results.c
    query = select(rows.request_id).where(tuple_(rows.batch_id, rows.line).in_(lines))
    return set(connection.execute(query).scalars()) & {result.request_id for result in results}
