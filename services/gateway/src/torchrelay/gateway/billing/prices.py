"""The price list: immutable rows, each valid from its time until the next row of the same model begins."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.common.ids import new_id
from torchrelay.gateway.core import Price
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import prices


def cost_nano(price: Price, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> int:
    """What tokens cost: cached prompt tokens at their own price, integers throughout."""
    num_fresh = num_prompt_tokens - num_cached_tokens
    return num_fresh * price.prompt_nano + num_cached_tokens * price.cached_nano + num_output_tokens * price.output_nano


def price_at(price_list: Sequence[Price], model: str, at_unix_us: int) -> Price:
    """The row of ``model`` valid at that time, else the default's. ``price_list`` is sorted by ``valid_from_unix_us``.

    A default row valid from time 0 is part of the schema; without it this raises ``LookupError``.
    """
    chosen: Price | None = None
    for price in price_list:
        if price.valid_from_unix_us > at_unix_us:
            break
        if price.model == model or (price.model == "" and (chosen is None or chosen.model == "")):
            chosen = price
    if chosen is None:
        raise LookupError("the price list has no default that is valid now")
    return chosen


def valid_until(price_list: Sequence[Price], price: Price) -> int | None:
    """When the next row of the same model begins; ``None`` while there is none."""
    later = (p.valid_from_unix_us for p in price_list if p.model == price.model)
    return min((begin for begin in later if begin > price.valid_from_unix_us), default=None)


class Prices:
    """Owns the prices table. The list is small and kept whole in memory, at its version."""

    def __init__(self, database: Database, versions: TableVersions) -> None:
        self._database = database
        self._versions = versions
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
        return price_at(await self.all(), model, time.time_ns() // 1000)

    async def add(
        self, model: str, prompt_nano: int, cached_nano: int, output_nano: int, valid_from_unix_us: int | None = None
    ) -> Price:
        """A new row, valid from now or from a later time. Raises ``InvalidRequest`` for a time that has passed."""
        now = time.time_ns() // 1000
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
