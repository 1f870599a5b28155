"""The price list: immutable rows, each valid from its time until the next row of the same model begins."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.common.ids import new_id
from torchrelay.gateway.billing.price_list import price_at
from torchrelay.gateway.core import Price
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import prices


class Prices:
    """Owns the prices table. The list is small and kept whole in memory, at its version."""

    def __init__(self, database: Database, versions: TableVersions, clock: Callable[[], int] = now_unix_us) -> None:
        self._database = database
        self._versions = versions
        self._clock_unix_us = clock
        self._loaded: tuple[int, list[Price]] = (-1, [])

    async def all(self) -> list[Price]:
        """Every row ever made, by the time it begins."""
        version = await self._versions.confirmed("catalog")
        if self._loaded[0] != version:
            async with self._database.read() as connection:
                rows = await connection.execute(select(prices).order_by(prices.c.valid_from_unix_us))
                self._loaded = (version, [Price(*row) for row in rows])
        return self._loaded[1]

    async def current(self, model: str) -> Price:
        """The price of ``model`` ("tenant/model") now."""
        return price_at(await self.all(), model, self._clock_unix_us())

    async def add(
        self, model: str, prompt_nano: int, cached_nano: int, output_nano: int, valid_from_unix_us: int | None = None
    ) -> Price:
        """A new row, valid from now or from a later time. Raises ``InvalidRequest`` for a time that has passed."""
        now = self._clock_unix_us()
        begin = now if valid_from_unix_us is None else valid_from_unix_us
        if begin < now:
            raise InvalidRequest("a price cannot begin in the past: what is billed stays billed", field="valid_from")
        price = Price(new_id("price"), model, prompt_nano, cached_nano, output_nano, begin)
        try:
            async with self._database.write() as connection:
                await connection.execute(
                    insert(prices).values(
                        price_id=price.price_id,
                        model=model,
                        prompt_nano=prompt_nano,
                        cached_nano=cached_nano,
                        output_nano=output_nano,
                        valid_from_unix_us=begin,
                    )
                )
                await bump_version(connection, "catalog")
        except IntegrityError as error:
            raise Conflict("there is a price that begins at that very time", field="valid_from") from error
        self._versions.invalidate()
        return price
