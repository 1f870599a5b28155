"""Alembic's environment: runs the migrations over the gateway's asyncio drivers."""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from torchrelay.gateway.sql.database import driver_url
from torchrelay.gateway.sql.tables import metadata

_LOCK = 0x7052_656C_6179  # an arbitrary id for the advisory lock


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        context.run_migrations()


async def _run() -> None:
    engine = create_async_engine(driver_url(context.config.attributes["url"]), poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(_migrate)
        await connection.commit()
    await engine.dispose()


asyncio.run(_run())
