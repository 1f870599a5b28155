from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import select, text

from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.schema import HEAD, MIGRATIONS, ensure_schema
from torchrelay.gateway.sql.tables import metadata, prices


def test_head_is_alembics_head_and_revisions_rise() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_current_head() == HEAD
    revisions = [script.revision for script in scripts.walk_revisions()]
    assert revisions == sorted(revisions, reverse=True)


async def test_migrations_create_exactly_the_tables(database: Database) -> None:
    async with database.read() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync), metadata)
        )
    assert differences == []


async def test_schema_has_a_default_price(database: Database) -> None:
    async with database.read() as connection:
        (row,) = (await connection.execute(select(prices))).all()
    assert (row.model, row.valid_from_unix_us) == ("", 0)


async def test_schema_at_head_or_newer_is_unchanged(database: Database, database_url: str) -> None:
    await ensure_schema(database, database_url)
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await ensure_schema(database, database_url)  # an older gateway beside a newer one
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalars().all() == ["9999"]


async def test_concurrent_starts_migrate_once(postgres_template: str) -> None:
    url = postgres_template  # the server's own database, still empty
    databases = [Database(url) for _ in range(3)]
    await asyncio.gather(*(ensure_schema(database, url) for database in databases))
    async with databases[0].read() as connection:
        assert (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalars().all() == [HEAD]
    for database in databases:
        await database.close()


async def test_failed_migration_names_the_cause(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/broken.db"
    database = Database(url)
    async with database.write() as connection:
        await connection.execute(text("CREATE TABLE tenants (x INTEGER)"))
    with pytest.raises(RuntimeError, match="table tenants already exists"):
        await ensure_schema(database, url)
    await database.close()
