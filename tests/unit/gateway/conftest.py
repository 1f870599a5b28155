"""A database per test, SQLite and (if installed) PostgreSQL, and the gateway's accounting on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile

import asyncpg
import pytest
from alembic import command
from alembic.config import Config

from tests.unit.gateway.postgres_server import postgres_server
from tests.unit.gateway.token_path_rig import make_rig, rig, tokenizer_json  # noqa: F401  (fixtures)
from torchrelay.gateway.auth.api_keys import ApiKeys
from torchrelay.gateway.auth.tenants import Tenant, Tenants
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.catalog import Catalog
from torchrelay.gateway.core import OpenedRequest
from torchrelay.gateway.sql.database import Database, SqlConnection
from torchrelay.gateway.sql.schema import MIGRATIONS
from torchrelay.gateway.sql.table_versions import TableVersions
from torchrelay.gateway.sql.tables import metadata

PEPPER = b"p" * 32
DATABASES = ["sqlite", "postgresql"]
TABLES = [*metadata.tables, "alembic_version"]
FILLED = ["table_versions", "counters", "prices", "alembic_version"]  # by the migrations
END_OTHERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()"""


@pytest.fixture(scope="session")
def postgres_template() -> Iterator[str]:
    """The URL of a server. Its database ``migrated`` is for the tests, and keeps its first rows as ``pristine``."""
    with postgres_server() as url:
        asyncio.run(execute(url, "CREATE DATABASE migrated"))
        tests_url = url.replace("/postgres", "/migrated")
        migrate(tests_url)
        copies = "".join(f"CREATE TABLE pristine.{table} AS TABLE {table};" for table in FILLED)
        asyncio.run(execute(tests_url, f"CREATE SCHEMA pristine; {copies}"))
        yield url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file, copied for each test."""
    path = tmp_path_factory.mktemp("sql") / "template.db"
    migrate(f"sqlite:///{path}")
    return path


def migrate(url: str, revision: str = "head") -> None:
    """In this process: the child that a gateway starts for it takes a second to import Alembic."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["url"] = url
    command.upgrade(config, revision)


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(statement)
    await connection.close()


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated database of each kind, without rows of other tests."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    return f"sqlite:///{copyfile(sqlite_template, tmp_path / 'ledger.db')}"


@pytest.fixture
def postgresql_url(postgres_template: str) -> str:
    """A migrated PostgreSQL database without connections and without rows of other tests; a new one takes 0.2 s."""
    url = postgres_template.replace("/postgres", "/migrated")
    rows = "".join(f"DELETE FROM {table};" for table in TABLES)
    rows += "".join(f"INSERT INTO {table} SELECT * FROM pristine.{table};" for table in FILLED)
    asyncio.run(execute(url, f"{END_OTHERS}; SET session_replication_role = replica; {rows}"))
    return url


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class InterruptibleDatabase(Database):
    """A database whose reads fail once it is ``away``, as those of a lost server do."""

    away: Database | None = None

    def interrupt(self) -> None:
        self.away = Database("sqlite:////nonexistent/folder/ledger.db")

    @asynccontextmanager
    async def read(self, time_limit_s: float | None = None) -> AsyncIterator[SqlConnection]:
        async with self.away.read() if self.away is not None else super().read(time_limit_s) as connection:
            yield connection

    async def close(self) -> None:
        await super().close()
        if self.away is not None:
            await self.away.close()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[InterruptibleDatabase]:
    opened = InterruptibleDatabase(database_url)
    yield opened
    await opened.close()


@dataclass(frozen=True)
class AccountingRig:
    """A gateway's accounting on a new database, with one tenant."""

    database: InterruptibleDatabase
    table_versions: TableVersions
    keys: ApiKeys
    prices: Prices
    catalog: Catalog
    ledger: Ledger
    tenants: Tenants
    acme: Tenant

    def request(self, request_id: str = "req-1", *, gateway_id: str = "gw-1", num_choices: int = 1) -> OpenedRequest:
        """An opened request of ``acme`` at the default price: 10 prompt tokens, at most 100 of output."""
        return OpenedRequest(
            request_id=request_id,
            tenant_id=self.acme.tenant_id,
            key_id="key-1",
            model="acme/glossary",
            version_id="v1",
            price_id="price-default",
            num_prompt_tokens=10,
            max_tokens=100,
            num_choices=num_choices,
            gateway_id=gateway_id,
            opened_unix_us=1,
        )


@pytest.fixture
async def parts(database: InterruptibleDatabase) -> AsyncIterator[AccountingRig]:
    table_versions = TableVersions(database, confirm_s=0.5)
    prices = Prices(database, table_versions)
    tenants = Tenants(database, table_versions)
    async with Ledger(database) as ledger:
        yield AccountingRig(
            database=database,
            table_versions=table_versions,
            keys=ApiKeys(database, table_versions, PEPPER, admin_key="tra-test"),
            prices=prices,
            catalog=Catalog(database, table_versions, prices),
            ledger=ledger,
            tenants=tenants,
            acme=await tenants.create("acme"),
        )
