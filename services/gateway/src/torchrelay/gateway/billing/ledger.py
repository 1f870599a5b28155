"""The ledger: requests are opened before their first token and settled once, whoever settles them.

    opened --settle by its gateway--------> settled
      `----settle by the sweep, later-----> settled      (gateway gone; see orphan_sweep.py)

Settling is one transaction: ``opened.settled_unix_us`` is set where it was not (this decides who wins), one ledger row
per choice is written, the tenant's balance grows by their cost. All opens and settles that wait at the same moment
share one transaction of a handful of statements, so the fsync of a commit is paid once for many requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import NotFound
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.billing.ledger_rows import LedgerRow, ledger_rows
from torchrelay.gateway.core import ChoiceUsage, OpenedRequest, Price
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.group_commit import GroupCommit, Result
from torchrelay.gateway.sql.tables import balances, ledger, opened, prices

log = get_logger(__name__)

# Made once: to build one of these takes longer than to run it.
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


@dataclass(frozen=True, slots=True)
class Settlement:
    """What one request is billed for."""

    request_id: str
    usages: tuple[ChoiceUsage, ...]


class Ledger:
    """Opens and settles requests; an async context manager that ends once what it was given is committed."""

    def __init__(self, database: Database) -> None:
        self._open = database.insert(opened).on_conflict_do_nothing()
        self._prices: dict[str, Price] = {}  # the list is small, and its rows never change
        self._commits: GroupCommit[OpenedRequest | Settlement] = GroupCommit(database, self._apply)

    async def __aenter__(self) -> Ledger:
        await self._commits.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._commits.__aexit__(*exc_info)

    async def open(self, request: OpenedRequest) -> None:
        """Returns once the row is committed; opening twice is once. Raises ``Unavailable`` when SQL is away."""
        await self._commits.do(request)

    async def settle(self, request_id: str, usages: Sequence[ChoiceUsage]) -> int:
        """Bills the request; returns what it cost, in nano-units, once committed.

        A second call changes nothing and returns the cost that stands. Raises ``NotFound`` for a request that was never
        opened, ``Unavailable`` when SQL is away: the caller tries again, for as long as the process lives.
        """
        return await self._commits.do(Settlement(request_id, tuple(usages)))

    def _apply(self, connection: Connection, writes: Sequence[OpenedRequest | Settlement]) -> dict[int, Result]:
        """The results of ``writes``, by their index."""
        opens = {index: write for index, write in enumerate(writes) if isinstance(write, OpenedRequest)}
        if opens:
            rows = [{name: getattr(write, name) for name in OpenedRequest.__slots__} for write in opens.values()]
            connection.execute(self._open, rows)
        settlements = {index: write for index, write in enumerate(writes) if isinstance(write, Settlement)}
        costs = self._settle(connection, list(settlements.values())) if settlements else {}
        results: dict[int, Result] = dict.fromkeys(opens, 0)
        for index, settlement in settlements.items():
            cost = costs.get(settlement.request_id)
            results[index] = _unknown(settlement) if cost is None else cost
        return results

    def _settle(self, connection: Connection, settlements: Sequence[Settlement]) -> dict[str, int]:
        """The cost that stands for each of these requests, by id; those never opened are missing."""
        usages = {settlement.request_id: settlement.usages for settlement in reversed(settlements)}  # the first counts
        now = now_unix_us()
        won = connection.execute(_WIN, {"request_ids": list(usages), "now": now})
        costs: dict[str, int] = {}
        charges: Counter[str] = Counter()
        values: list[dict[str, Any]] = []
        for request in [opened_of(row) for row in won]:
            price = self._prices.get(request.price_id) or self._price(connection, request.price_id)
            rows = ledger_rows(request, usages[request.request_id], price)
            values.extend(_ledger_values(request, row, now) for row in rows)
            costs[request.request_id] = sum(row.cost_nano for row in rows)
            charges[request.tenant_id] += costs[request.request_id]
        if values:
            connection.execute(_BILL, values)
            # In one order everywhere: no two gateways wait for each other.
            connection.execute(_CHARGE, [{"tenant": one, "cost": charges[one]} for one in sorted(charges)])
        return costs | _standing_costs(connection, usages.keys() - costs.keys())

    def _price(self, connection: Connection, price_id: str) -> Price:
        row = connection.execute(select(prices).where(prices.c.price_id == price_id)).one()
        price = self._prices[price_id] = Price(*row)
        return price


def _standing_costs(connection: Connection, request_ids: Iterable[str]) -> dict[str, int]:
    """What requests settled before did cost."""
    wanted = list(request_ids)
    if not wanted:
        return {}
    query = select(ledger.c.request_id, func.sum(ledger.c.cost_nano)).where(ledger.c.request_id.in_(wanted))
    rows = connection.execute(query.group_by(ledger.c.request_id)).all()
    for request_id, _ in rows:
        log.info("settled_before", request_id=request_id)
    return {request_id: int(cost) for request_id, cost in rows}


def _unknown(settlement: Settlement) -> NotFound:
    return NotFound(f"request {settlement.request_id} was never opened", field="request_id")


def opened_of(row: Sequence[Any]) -> OpenedRequest:
    """The opened request in a whole row of the ``opened`` table, whose last column says when it was settled."""
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
