"""Brings the schema to this version's head at start.

Alembic costs megabytes and runs once, so it runs in a child process, and only when the schema is not there yet. Several
gateways that start together on PostgreSQL take turns (an advisory lock); the later ones find nothing to do.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sqlalchemy import inspect, text

from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.sql.database import Database, SqlConnection

log = get_logger(__name__)
HEAD = "0001"  # revisions are rising numbers, so that an older gateway knows a newer schema when it meets one
MIGRATIONS = Path(__file__).with_name("migrations")


async def ensure_schema(database: Database, url: str) -> None:
    """Returns once the schema is at ``HEAD`` or newer. Raises ``RuntimeError`` with Alembic's words when it fails."""
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
    _, said = await child.communicate(url.encode())  # by standard input: a URL holds a password
    if child.returncode != 0:
        raise RuntimeError(f"the database could not be brought to revision {HEAD}:\n{said.decode()[-2000:]}")


async def _revision(connection: SqlConnection) -> str:
    """The schema's revision; empty for a fresh database."""
    tables = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    if "alembic_version" not in tables:
        return ""
    return (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one_or_none() or ""


def main() -> None:
    """The child process: reads the database's URL from standard input and upgrades it."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["url"] = sys.stdin.read()
    command.upgrade(config, "head")


if __name__ == "__main__":
    main()
