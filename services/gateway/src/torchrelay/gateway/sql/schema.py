"""Migrates the schema at start.

Alembic takes megabytes and runs once, hence in a child process, and only if the schema is outdated. Gateways starting
together on PostgreSQL are serialized by an advisory lock; the later ones find nothing to do.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sqlalchemy import inspect, text

from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.sql.database import Database, SqlConnection

log = get_logger(__name__)
HEAD = "0018"  # revisions increase, so that an older gateway recognizes a newer schema
MIGRATIONS = Path(__file__).with_name("migrations")


async def ensure_schema(database: Database, url: str) -> None:
    """Returns once the schema is at ``HEAD`` or newer. Raises ``RuntimeError`` with Alembic's output on failure."""
    async with database.read() as connection:
        revision = await _revision(connection)
    if revision >= HEAD:
        return
    log.info("migrating", revision=revision, head=HEAD)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "torchrelay.gateway.sql.schema",
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, output = await child.communicate(url.encode())  # through stdin, because a URL may hold a password
    if child.returncode != 0:
        raise RuntimeError(f"cannot migrate the database to revision {HEAD}:\n{output.decode()[-2000:]}")


async def _revision(connection: SqlConnection) -> str:
    """The schema's revision; empty for a new database."""
    tables = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    if "alembic_version" not in tables:
        return ""
    return (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one_or_none() or ""


def main() -> None:
    """The child process: upgrades the database whose URL it reads from stdin."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["url"] = sys.stdin.read()
    command.upgrade(config, "head")


if __name__ == "__main__":
    main()
