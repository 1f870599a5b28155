"""The table of batches: what callers ask of it, and each step of a batch's state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, case, delete, func, insert, literal, select, tuple_, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest, NotFound, Overloaded
from torchrelay.common.ids import new_id
from torchrelay.gateway.batches.core import ENDPOINTS, OPEN, WINDOW_S, Batch, BatchStatus, Purpose, StoredFile
from torchrelay.gateway.batches.files import Files, row_of
from torchrelay.gateway.catalog.storage_quota import check_quota, locked_quota
from torchrelay.gateway.core import Principal
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import batch_results, batches, files, gateways

_DELETED_AT_ONCE, _MAX_CLAIMABLE = 500, 1000
_CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class Batches:
    """Owns the table, and that of results from the time when its batch takes no more of them."""

    def __init__(self, database: Database, files_: Files, max_open: int = 16, window_s: float = WINDOW_S) -> None:
        """``max_open``: of a tenant. ``window_s``: in which a batch is to end."""
        self._database, self._files, self._max_open, self._window_s = database, files_, max_open, window_s

    async def create(
        self, principal: Principal, endpoint: str, input_file_id: str, metadata: Mapping[str, str]
    ) -> Batch:
        """Raises ``InvalidRequest``, ``NotFound`` for the file, ``Overloaded`` if the tenant has too many open, and
        ``QuotaExceeded``.
        """
        if endpoint not in ENDPOINTS:
            raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", field="endpoint")
        try:
            file = await self._files.find(principal.tenant_id, input_file_id)
        except NotFound as error:
            raise NotFound(error.message, field="input_file_id") from None
        if file.purpose is not Purpose.BATCH:
            raise InvalidRequest(f"the file's purpose must be batch, not {file.purpose}", field="input_file_id")
        now, batch_id = now_unix_us(), new_id("batch")
        of_tenant = batches.c.tenant_id == principal.tenant_id
        async with self._database.write() as connection:
            quota = await locked_quota(connection, principal.tenant_id)  # also against the deletion of the file
            if quota is not None:
                await check_quota(connection, principal.tenant_id, quota, 0, field="input_file_id")
            is_there = select(files.c.file_id).where(files.c.file_id == input_file_id, files.c.is_complete.is_(True))
            if (await connection.execute(is_there)).one_or_none() is None:
                raise NotFound(f"file {input_file_id!r} not found", field="input_file_id")
            num_open = select(func.count()).where(of_tenant, batches.c.status.in_(OPEN))
            if (await connection.execute(num_open)).scalar_one() >= self._max_open:
                raise Overloaded(
                    f"{self._max_open} batches are open already; wait for one, or cancel it", retry_after_s=60
                )
            row = {
                "batch_id": batch_id,
                "tenant_id": principal.tenant_id,
                "key_id": principal.key_id,
                "endpoint": endpoint,
                "input_file_id": input_file_id,
                "metadata": json.dumps(dict(metadata)),
                "status": BatchStatus.VALIDATING,
                "created_unix_us": now,
                "expires_unix_us": now + int(self._window_s * 1e6),
            }
            await connection.execute(insert(batches).values(row))
        return await self.find(principal.tenant_id, batch_id)

    async def find(self, tenant_id: str | None, batch_id: str) -> Batch:
        """A batch of the tenant (None: of any). Raises ``NotFound``."""
        async with self._database.read() as connection:
            row = (await connection.execute(_of(tenant_id).where(batches.c.batch_id == batch_id))).one_or_none()
        if row is None:
            raise NotFound(f"batch {batch_id[:100]!r} not found", field="batch_id")
        return _batch(row)

    async def page(self, tenant_id: str | None, limit: int, after: str | None) -> tuple[list[Batch], bool]:
        """At most ``limit`` batches that follow ``after``, newest first, and whether there are more."""
        query, place = _of(tenant_id), (batches.c.created_unix_us, batches.c.batch_id)
        if after is not None:
            last = await self.find(tenant_id, after)
            query = query.where(tuple_(*place) < tuple_(literal(last.created_unix_us), literal(last.batch_id)))
        order = [column.desc() for column in place]
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(*order).limit(limit + 1))).all()
        return [_batch(row) for row in rows[:limit]], len(rows) > limit

    async def counts(self, shown: Sequence[Batch]) -> dict[str, tuple[int, int]]:
        """The lines of each batch that have succeeded and failed."""
        ids = [batch.batch_id for batch in shown if batch.status in OPEN]
        counts = {batch.batch_id: (batch.num_completed, batch.num_failed) for batch in shown}
        if ids:
            async with self._database.read() as connection:
                counts |= dict.fromkeys(ids, (0, 0)) | await _counts(connection, ids)
        return counts

    async def cancel(self, tenant_id: str | None, batch_id: str) -> Batch:
        """Begins the end of a batch; again it has no effect. Raises ``Conflict`` for one that has ended."""
        batch = await self.find(tenant_id, batch_id)
        if await self._step(batch.batch_id, _CANCELLABLE, BatchStatus.CANCELLING):
            return await self.find(tenant_id, batch_id)
        batch = await self.find(tenant_id, batch_id)
        if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            raise Conflict(f"batch {batch_id} is {batch.status}: it can no longer be cancelled", field="batch_id")
        return batch

    async def cancel_all(self, tenant_id: str) -> None:
        """Begins the end of all batches of a tenant."""
        of_tenant = update(batches).where(batches.c.tenant_id == tenant_id, batches.c.status.in_(_CANCELLABLE))
        async with self._database.write() as connection:
            await connection.execute(of_tenant.values(status=BatchStatus.CANCELLING, cancelling_unix_us=now_unix_us()))

    async def _step(
        self, batch_id: str, before: Sequence[BatchStatus], after: BatchStatus, gateway_id: str = "", **values: Any
    ) -> bool:
        """Whether the batch was in one of these states, and run by this gateway (empty: any), and now has the next."""
        step = update(batches).where(batches.c.batch_id == batch_id, batches.c.status.in_(before))
        if gateway_id:
            step = step.where(batches.c.gateway_id == gateway_id)
        async with self._database.write() as connection:
            moved = await connection.execute(step.values(status=after, **{f"{after}_unix_us": now_unix_us()}, **values))
        return moved.rowcount > 0

    async def claimable(self, gateway_id: str) -> list[Batch]:
        """Open batches of this gateway, then those whose gateway is gone or never was, the oldest of them."""
        of = batches.c.gateway_id
        may_be_run = (of == gateway_id) | of.not_in(select(gateways.c.gateway_id))
        query = select(batches).where(batches.c.status.in_(OPEN), may_be_run)
        query = query.order_by((of == gateway_id).desc(), batches.c.created_unix_us).limit(_MAX_CLAIMABLE)
        async with self._database.read() as connection:
            rows = await connection.execute(query)
            return [_batch(row) for row in rows]

    async def claim(self, batch: Batch, gateway_id: str) -> bool:
        """Whether the batch is this gateway's now."""
        query = update(batches).where(batches.c.batch_id == batch.batch_id, batches.c.gateway_id == batch.gateway_id)
        async with self._database.write() as connection:
            return (await connection.execute(query.values(gateway_id=gateway_id))).rowcount > 0

    async def begin(self, batch: Batch, gateway_id: str, num_lines: int) -> bool:
        before = (BatchStatus.VALIDATING,)
        return await self._step(batch.batch_id, before, BatchStatus.IN_PROGRESS, gateway_id, num_lines=num_lines)

    async def fail(self, batch: Batch, gateway_id: str, errors: Sequence[Mapping[str, Any]], num_lines: int) -> bool:
        values = {"errors": json.dumps(errors), "num_lines": num_lines}
        return await self._step(batch.batch_id, (BatchStatus.VALIDATING,), BatchStatus.FAILED, gateway_id, **values)

    async def finalize(self, batch: Batch, gateway_id: str) -> bool:
        """Takes no more results."""
        return await self._step(batch.batch_id, (BatchStatus.IN_PROGRESS,), BatchStatus.FINALIZING, gateway_id)

    async def statuses(self, batch_id: str) -> dict[int, int]:
        """The status of each line that has a result."""
        query = select(batch_results.c.line, batch_results.c.status).where(batch_results.c.batch_id == batch_id)
        async with self._database.read() as connection:
            return {row.line: row.status for row in await connection.execute(query)}

    async def results(self, batch_id: str, begin: int, end: int) -> dict[int, Any]:
        """The results of the lines from ``begin`` up to ``end``."""
        query = select(batch_results).where(batch_results.c.batch_id == batch_id)
        query = query.where(batch_results.c.line >= begin, batch_results.c.line < end)
        async with self._database.read() as connection:
            return {row.line: row for row in await connection.execute(query)}

    async def end(
        self,
        batch: Batch,
        gateway_id: str,
        status: BatchStatus,
        output: StoredFile | None,
        errors: StoredFile | None,
        counts: tuple[int, int],
    ) -> None:
        """Names the files of results and ends the batch, in one transaction.

        ``counts``: the lines that have succeeded and failed. Does nothing if the batch is another gateway's.
        """
        before = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)
        ending = update(batches).where(
            batches.c.batch_id == batch.batch_id, batches.c.gateway_id == gateway_id, batches.c.status.in_(before)
        )
        values = {
            "status": status,
            f"{status}_unix_us": now_unix_us(),
            "output_file_id": output and output.file_id,
            "error_file_id": errors and errors.file_id,
            "num_completed": counts[0],
            "num_failed": counts[1],
        }
        async with self._database.write() as connection:
            if (await connection.execute(ending.values(values))).rowcount == 0:
                return
            for file in filter(None, (output, errors)):
                await connection.execute(insert(files).values(row_of(file)))

    async def clear_ended(self) -> None:
        """Deletes the results of batches that have ended, some at a time: of tens of thousands each may be large."""
        rows = batch_results.c
        ended = select(batches.c.batch_id).where(batches.c.status.not_in(OPEN))
        query = select(rows.batch_id, func.min(rows.line).label("least"), func.max(rows.line).label("most"))
        async with self._database.read() as connection:
            left = (await connection.execute(query.where(rows.batch_id.in_(ended)).group_by(rows.batch_id))).all()
        for row in left:
            for begin in range(row.least, row.most + 1, _DELETED_AT_ONCE):
                of_part = rows.line >= begin, rows.line < begin + _DELETED_AT_ONCE
                async with self._database.write() as connection:
                    await connection.execute(delete(batch_results).where(rows.batch_id == row.batch_id, *of_part))


async def _counts(connection: Any, batch_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    rows = batch_results.c
    completed = func.sum(case((rows.status == 200, 1), else_=0))
    query = select(rows.batch_id, completed, func.count()).where(rows.batch_id.in_(batch_ids)).group_by(rows.batch_id)
    return {row[0]: (int(row[1]), row[2] - int(row[1])) for row in await connection.execute(query)}


def _of(tenant_id: str | None) -> Select[Any]:
    query = select(batches)
    return query if tenant_id is None else query.where(batches.c.tenant_id == tenant_id)


def _batch(row: Any) -> Batch:
    return Batch(**{**row._mapping, "status": BatchStatus(row.status)})
