"""The ledger: requests are opened before their first token and settled exactly once.

    opened --settled by its gateway---------> settled
      `----settled by the sweep, later------> settled --supplemented by its gateway, if that was not gone-->

Settling is one transaction: it sets ``opened.settled_unix_us`` if unset (which decides a race), inserts one ledger row
per choice, and adds these to the tenant's balance and to the sums of the hour. A gateway that the sweep took for gone
(see orphan_sweep.py) and that delivered more than the sweep has billed adds the difference, once. A batch's line is
billed in the transaction that keeps its result (line_results.py), or not at all. All opens and settles pending at one
moment share a transaction of a few statements, so that many requests share the fsync of one commit.

Rows are numbered in the order of commits: the last statement but one takes the numbers, and locks their counter until
the commit. A reader that sees a number sees all smaller ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import NotFound
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.billing.ledger_rows import LedgerRow, ledger_rows, supplement_rows
from torchrelay.gateway.billing.line_results import LineLost, keep_results, kept_ids
from torchrelay.gateway.billing.usage_hours import add_to_hours, hour_sums
from torchrelay.gateway.core import ChoiceUsage, FinishCause, LineResult, OpenedRequest, Price
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.group_commit import GroupCommit, Result
from torchrelay.gateway.sql.tables import balances, batch_results, counters, ledger, opened, prices

log = get_logger(__name__)

# Built once: building such a statement takes longer than running it.
_WIN = (
    update(opened)
    .where(opened.c.request_id.in_(bindparam("request_ids", expanding=True)), opened.c.settled_unix_us.is_(None))
    .values(settled_unix_us=bindparam("now"))
    .returning(*opened.c)
)
_BILL = insert(ledger)
_CHARGE = (
    update(balances)
    .where(balances.c.tenant_id == bindparam("tenant"))
    .values(spent_nano=balances.c.spent_nano + bindparam("cost"))
)
_TAKE_NUMBERS = (
    update(counters)
    .where(counters.c.name == "ledger")
    .values(last=counters.c.last + bindparam("num_rows"))
    .returning(counters.c.last)
)
_KEY = ("request_id", "choice", "supplement")
_SET_NUMBER = (
    update(ledger)
    .where(*(ledger.c[name] == bindparam(f"of_{name}") for name in _KEY))
    .values(ledger_id=bindparam("number"))
)
_UNNUMBERED = (
    select(ledger)
    .where(ledger.c.ledger_id.is_(None))
    .order_by(ledger.c.settled_unix_us, *(ledger.c[name] for name in _KEY))
    .limit(1000)
    .with_for_update(skip_locked=True)
)


@dataclass(frozen=True, slots=True)
class Settlement:
    """The usage one request is billed for."""

    request_id: str
    usages: tuple[ChoiceUsage, ...]


@dataclass(frozen=True, slots=True)
class LineSettlement:
    """The result of a batch's line, and the requests that gave it, which are billed if it is kept."""

    result: LineResult
    parts: tuple[Settlement, ...]


class Ledger(GroupCommit[OpenedRequest | Settlement | LineSettlement]):
    """Opens and settles requests. An async context manager; on exit it commits pending writes."""

    def __init__(self, database: Database, clock: Callable[[], int] = now_unix_us) -> None:
        super().__init__(database, self._write)
        self._clock_unix_us = clock
        self._open = database.insert(opened).on_conflict_do_nothing()
        self._add_to_hours = add_to_hours(database)
        self._keep = database.insert(batch_results).on_conflict_do_nothing()
        self._prices: dict[str, Price] = {}  # few rows, and immutable

    async def open(self, request: OpenedRequest) -> None:
        """Returns once the row is committed. Idempotent. Raises ``Unavailable`` without SQL."""
        await self.do(request)

    async def settle(self, request_id: str, usages: Sequence[ChoiceUsage]) -> int:
        """Bills the request; returns its cost in nano-dollars once committed.

        A second call changes nothing and returns the recorded cost, except that the request's own gateway supplements
        what the sweep has billed. Raises ``NotFound`` for a request that was never opened, and ``Unavailable`` without
        SQL; the caller is expected to retry.
        """
        return await self.do(Settlement(request_id, tuple(usages)))

    async def count_uncounted(self) -> None:
        """Numbers rows of gateways of the release before, and adds them to the sums of their hours."""
        is_uncounted = select(ledger.c.request_id).where(ledger.c.ledger_id.is_(None)).limit(1)
        while True:
            async with self._database.read() as connection:
                if (await connection.execute(is_uncounted)).first() is None:
                    return
            await self._database.transact(self._count_uncounted)

    def _count_uncounted(self, connection: Connection) -> None:
        rows = [dict(row) for row in connection.execute(_UNNUMBERED).mappings()]
        if rows:  # unless another gateway counts them
            connection.execute(self._add_to_hours, hour_sums(rows))
            _number(connection, rows)
            numbers = [{f"of_{name}": row[name] for name in _KEY} | {"number": row["ledger_id"]} for row in rows]
            connection.execute(_SET_NUMBER, numbers)

    async def settle_line(self, result: LineResult, parts: Sequence[tuple[str, Sequence[ChoiceUsage]]]) -> int:
        """Keeps the result of a batch's line and bills its requests, in one transaction; returns their cost.

        Idempotent. Raises ``LineLost``, and bills nothing, if the line has another result, its batch takes none any
        more, or a request was settled before: by the sweep, which took this gateway for gone.
        """
        return await self.do(LineSettlement(result, tuple(Settlement(name, tuple(usages)) for name, usages in parts)))

    def _write(
        self, connection: Connection, writes: Sequence[OpenedRequest | Settlement | LineSettlement]
    ) -> dict[int, Result]:
        """The results of ``writes``, by their index."""
        opens = {index: write for index, write in enumerate(writes) if isinstance(write, OpenedRequest)}
        if opens:
            rows = [{name: getattr(write, name) for name in OpenedRequest.__slots__} for write in opens.values()]
            connection.execute(self._open, rows)
        settlements = {index: write for index, write in enumerate(writes) if isinstance(write, Settlement)}
        lines = {index: write for index, write in enumerate(writes) if isinstance(write, LineSettlement)}
        parts = [part for line in lines.values() for part in line.parts]
        kept: set[str] = set()
        costs: dict[str, int] = {}
        if settlements or lines:
            costs = self._settle(connection, [*settlements.values(), *parts], list(lines.values()), kept)
        results: dict[int, Result] = dict.fromkeys(opens, 0)
        for index, line in lines.items():
            of_line = sum(costs.get(part.request_id, 0) for part in line.parts)
            results[index] = (
                of_line if line.result.request_id in kept else LineLost("the result of the line is not kept")
            )
        for index, settlement in settlements.items():
            cost = costs.get(settlement.request_id)
            unknown = NotFound(f"request {settlement.request_id} was never opened", field="request_id")
            results[index] = unknown if cost is None else cost
        return results

    def _settle(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        lines: Sequence[LineSettlement],
        kept: set[str],
    ) -> dict[str, int]:
        """The recorded cost by request id, without requests that were never opened. Adds to ``kept`` the attempts at
        ``lines`` whose results are kept.
        """
        usages = {settlement.request_id: settlement.usages for settlement in reversed(settlements)}  # the first wins
        now = self._clock_unix_us()
        costs: dict[str, int] = {}
        charges: Counter[str] = Counter()
        values: list[dict[str, Any]] = []

        def bill(request: OpenedRequest, rows: Sequence[LedgerRow]) -> None:
            cost = sum(row.cost_nano for row in rows)
            values.extend(_ledger_values(request, row, now) for row in rows)
            costs[request.request_id] = costs.get(request.request_id, 0) + cost
            charges[request.tenant_id] += cost

        won = [opened_of(row) for row in connection.execute(_WIN, {"request_ids": list(usages), "now": now})]
        if lines:
            ids = {request.request_id for request in won}
            to_keep = [line.result for line in lines if all(part.request_id in ids for part in line.parts)]
            keep_results(connection, self._keep, to_keep)
            kept |= kept_ids(connection, [line.result for line in lines])
            lost = (line for line in lines if line.result.request_id not in kept)
            usages.update((part.request_id, ()) for line in lost for part in line.parts)
        for request in won:
            bill(request, ledger_rows(request, usages[request.request_id], self._price(connection, request)))
        for request, standing in _settled_before(connection, usages.keys() - costs.keys()):
            costs[request.request_id] = sum(row.cost_nano for row in standing)
            price, used = self._price(connection, request), usages[request.request_id]
            if any(
                usage.cause is not FinishCause.GATEWAY_LOST for usage in used
            ):  # by its gateway, not by another sweep
                bill(request, supplement_rows(standing, ledger_rows(request, used, price), price))
        if values:
            # Sorted, so that two gateways never deadlock on each other's rows.
            connection.execute(_CHARGE, [{"tenant": tenant, "cost": charges[tenant]} for tenant in sorted(charges)])
            connection.execute(self._add_to_hours, hour_sums(values))
            _number(connection, values)
            connection.execute(_BILL, values)
        return costs

    def _price(self, connection: Connection, request: OpenedRequest) -> Price:
        price = self._prices.get(request.price_id)
        if price is None:
            row = connection.execute(select(prices).where(prices.c.price_id == request.price_id)).one()
            price = self._prices[request.price_id] = Price(*row)
        return price


def _number(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Gives the rows the next numbers; other gateways wait for theirs until this transaction ends."""
    last: int = connection.execute(_TAKE_NUMBERS, {"num_rows": len(rows)}).scalar_one()
    for number, row in enumerate(rows, last - len(rows) + 1):
        row["ledger_id"] = number


def _settled_before(
    connection: Connection, request_ids: Collection[str]
) -> list[tuple[OpenedRequest, list[LedgerRow]]]:
    """The requests among these that were settled earlier, with their rows."""
    if not request_ids:
        return []
    rows: dict[str, list[LedgerRow]] = defaultdict(list)
    query = select(*(ledger.c[name] for name in LedgerRow.__slots__)).where(ledger.c.request_id.in_(list(request_ids)))
    for row in connection.execute(query):
        rows[row.request_id].append(LedgerRow(**{**row._mapping, "cause": FinishCause(row.cause)}))
    for request_id in rows:
        log.info("settled_before", request_id=request_id)
    requests = connection.execute(select(opened).where(opened.c.request_id.in_(list(rows))))
    return [(opened_of(row), rows[row.request_id]) for row in requests]


def opened_of(row: Sequence[Any]) -> OpenedRequest:
    """The request in a full row of the ``opened`` table; the last column is the time of settlement."""
    return OpenedRequest(*row[:-1])


def _ledger_values(request: OpenedRequest, row: LedgerRow, settled_unix_us: int) -> dict[str, Any]:
    return {name: getattr(row, name) for name in LedgerRow.__slots__} | {
        "tenant_id": request.tenant_id,
        "key_id": request.key_id,
        "model": request.model,
        "version_id": request.version_id,
        "price_id": request.price_id,
        "settled_unix_us": settled_unix_us,
    }
