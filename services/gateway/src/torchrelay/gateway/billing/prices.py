"""The table of prices: immutable rows, each valid until the next row of the same model and service starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.common.ids import new_id
from torchrelay.gateway.billing.price_list import PriceList
from torchrelay.gateway.core import Price, PriceService
from torchrelay.gateway.sql.audit import record
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import prices


class Prices:
    """Owns the prices table. The list is small and cached whole, per version of the catalog."""

    def __init__(self, database: Database, versions: TableVersions, clock: Callable[[], int] = now_unix_us) -> None:
        self._database = database
        self._versions = versions
        self._clock_unix_us = clock
        self._loaded = -1, PriceList(())

    async def all(self) -> PriceList:
        """All rows."""
        version = await self._versions.everybodys_catalog()
        if self._loaded[0] != version:
            async with self._database.read() as connection:
                rows = await connection.execute(select(prices).order_by(prices.c.valid_from_unix_us))
                self._loaded = version, PriceList([Price(*row) for row in rows])
        return self._loaded[1]

    async def current(self, model: str, service: PriceService = "") -> Price:
        """The current price of ``model`` ("tenant/model")."""
        return (await self.all()).at(model, self._clock_unix_us(), service)

    async def add(
        self,
        model: str,
        prompt_nano: int,
        cached_nano: int,
        output_nano: int,
        valid_from_unix_us: int | None = None,
        service: PriceService = "",
    ) -> Price:
        """Adds a row, valid from now or a later time. Raises ``InvalidRequest`` for a past time."""
        now = self._clock_unix_us()
        begin = now if valid_from_unix_us is None else valid_from_unix_us
        if begin < now:
            raise InvalidRequest("valid_from must not be in the past", field="valid_from")
        price = Price(new_id("price"), model, prompt_nano, cached_nano, output_nano, begin, service)
        try:
            async with self._database.write() as connection:
                await connection.execute(insert(prices).values(asdict(price)))
                added = {"prompt_nano": prompt_nano, "cached_nano": cached_nano, "output_nano": output_nano}
                await record(connection, "price.add", model or "default", None, None, {**added, "valid_from": begin})
                await bump_version(connection, "catalog")
        except IntegrityError as error:
            raise Conflict("a price with this valid_from already exists", field="valid_from") from error
        self._versions.invalidate()
        return price
