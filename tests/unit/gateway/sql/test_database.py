"""The database: transactions, silence, full disks, group commits, migrations, and the versions of its tables."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, func, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError, ProgrammingError

from tests.support.programs import Program
from tests.support.silent_proxy import SilentProxy
from tests.support.small_disk import small_disk
from tests.support.wait import HANG_S, eventually
from tests.unit.gateway.conftest import DATABASES, AccountingRig, execute, migrate
from torchrelay.common.errors import DiskFull, NotFound, Unavailable
from torchrelay.gateway.sql.database import Database, driver_url
from torchrelay.gateway.sql.group_commit import GroupCommit, Result, linger_s
from torchrelay.gateway.sql.schema import HEAD, MIGRATIONS, ensure_schema
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import (
    balances,
    counters,
    ledger,
    metadata,
    prices,
    table_versions,
    usage_hours,
    versions,
)
from torchrelay.gateway.sql.versioned_cache import VersionedCache


async def test_write_and_transact_are_atomic(database: Database) -> None:
    query = select(table_versions.c.version)

    def raise_to_7(connection: Connection) -> int:
        return connection.execute(update(table_versions).values(version=7)).rowcount

    def fail(connection: Connection) -> None:
        raise_to_7(connection)
        _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        async with database.write() as connection:
            await connection.execute(update(table_versions).values(version=99))
            _ = 1 // 0
    with pytest.raises(ZeroDivisionError):
        await database.transact(fail)
    assert set(await database.transact(lambda connection: connection.execute(query).scalars().all())) == {1}
    assert await database.transact(raise_to_7) == 3  # keys, the catalog, and changes of tenants to it
    async with database.read() as connection:
        assert set((await connection.execute(query)).scalars()) == {7}


async def test_concurrent_writes_and_transacts_lose_nothing(database: Database) -> None:
    more = update(table_versions).values(version=table_versions.c.version + 1)

    async def raise_it() -> None:
        async with database.write() as connection:
            await connection.execute(more)

    await asyncio.gather(
        *(raise_it() for _ in range(20)),
        *(database.transact(lambda connection: connection.execute(more).rowcount) for _ in range(20)),
    )
    async with database.read() as connection:
        assert set((await connection.execute(select(table_versions.c.version))).scalars()) == {41}


async def test_cancelled_transact_keeps_the_write_lock(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, about: complaints.append(about["message"]))

    def work(_connection: Connection) -> None:
        begun.set()
        assert may_end.wait(HANG_S)
        ended.set()
        raise ValueError("the caller is gone")

    writing = asyncio.ensure_future(database.transact(work))
    assert await asyncio.to_thread(begun.wait, HANG_S)
    following = asyncio.ensure_future(database.transact(lambda _: ended.is_set()))
    for _ in range(2):
        writing.cancel()
        await asyncio.to_thread(lambda: None)  # more than the steps in which a released lock would be taken
    assert not following.done()
    may_end.set()
    assert await following, "it began when the other had ended"
    await asyncio.wait({writing})
    assert writing.cancelled()
    gc.collect()
    assert not complaints
    await database.close()


ENDLESS = text("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n")


async def read_version(database: Database) -> int:
    async with database.read() as connection:
        return int((await connection.execute(select(func.max(table_versions.c.version)))).scalar_one())


async def raise_version(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(update(table_versions).values(version=table_versions.c.version + 1))


@pytest.mark.parametrize("used_before", [True, False])
async def test_silent_server_is_unavailable_until_it_answers(postgresql_url: str, used_before: bool) -> None:
    async with SilentProxy(postgresql_url).serving() as proxy:
        database = Database(proxy.url, time_limit_s=0.5)
        if used_before:  # a connection in the pool, and one that has yet to be made, fail differently
            await asyncio.gather(*(read_version(database) for _ in range(3)))
        proxy.fall_silent()
        async with asyncio.timeout(HANG_S):
            outcomes = await asyncio.gather(
                read_version(database),
                raise_version(database),
                database.transact(lambda connection: connection.execute(text("SELECT 1")).all()),
                database.answer(read_version(database), 0.2),
                return_exceptions=True,
            )
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes
        assert "the database does not answer" in str(outcomes[3])
        proxy.speak()
        before = await until_it_answers(database)
        await raise_version(database)
        assert await read_version(database) == before + 1
        await database.close()


async def outcome(work: Coroutine[Any, Any, None]) -> BaseException | None:
    return (await asyncio.gather(work, return_exceptions=True))[0]


async def until_it_answers(database: Database) -> int:
    async def answers() -> bool:
        with suppress(Unavailable):
            await read_version(database)
            return True
        return False

    await eventually(answers)
    return await read_version(database)


async def test_silence_within_a_transaction_commits_nothing(postgresql_url: str) -> None:
    async with SilentProxy(postgresql_url).serving() as proxy:
        database, direct = Database(proxy.url, time_limit_s=0.5), Database(postgresql_url)
        with pytest.raises(Unavailable, match="the database does not answer"):
            async with database.write() as connection:
                await connection.execute(update(table_versions).values(version=99))
                proxy.fall_silent()
                await connection.execute(update(table_versions).values(version=100))
        assert await read_version(direct) == 1
        proxy.speak()
        await until_it_answers(database)
        await database.close()
        await direct.close()


async def test_endless_statement_is_broken_off(database_url: str) -> None:
    database = Database(database_url)
    for _ in range(5):  # more than SQLite has connections
        with pytest.raises(Unavailable, match="the database does not answer"):
            async with database.read(0.2) as connection:
                await connection.execute(ENDLESS)
    assert await read_version(database) == 1
    await database.close()


async def test_report_has_a_longer_time_limit(database_url: str) -> None:
    database = Database(database_url, time_limit_s=1e-6)
    with pytest.raises(Unavailable):
        await read_version(database)
    async with database.read(20) as connection:
        assert (await connection.execute(select(func.max(table_versions.c.version)))).scalar_one() == 1
    await database.close()


async def test_wait_for_the_writer_is_bounded(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db", time_limit_s=0.3)
    begun, may_end = threading.Event(), threading.Event()

    def block(_connection: Connection) -> None:
        begun.set()
        may_end.wait(HANG_S)

    stuck = asyncio.ensure_future(database.transact(block))
    assert await asyncio.to_thread(begun.wait, HANG_S)
    for _ in range(2):
        with pytest.raises(Unavailable, match="the database does not answer"):
            await database.transact(lambda _: None)
    with pytest.raises(Unavailable):
        await stuck
    may_end.set()
    async with asyncio.timeout(HANG_S):
        while isinstance(await outcome(database.transact(lambda _: None)), Unavailable):
            pass
    await database.close()


async def test_only_connection_faults_are_unavailable(database: Database) -> None:
    for url in ("sqlite:////nonexistent/folder/x.db", "postgresql://nobody@127.0.0.1:1/x"):
        away = Database(url)
        with pytest.raises(Unavailable):
            async with away.read() as connection:
                await connection.execute(text("SELECT 1"))
        with pytest.raises(Unavailable):
            await away.transact(lambda connection: connection.execute(text("SELECT 1")).all())
        await away.close()
    with pytest.raises((ProgrammingError, Unavailable)):
        async with database.read() as connection:
            await connection.execute(text("SELECT nothing FROM nowhere"))
    with pytest.raises(IntegrityError):  # of a foreign key
        async with database.write() as connection:
            await connection.execute(balances.insert().values(tenant_id="nobody", spent_nano=0))


async def test_server_without_free_connections_is_unavailable(postgresql_url: str) -> None:
    owner = Database(postgresql_url)
    async with owner.write() as connection:
        await connection.execute(text("CREATE ROLE crowd LOGIN PASSWORD 'x' CONNECTION LIMIT 0"))
    url = make_url(postgresql_url).set(username="crowd", password="x")
    database = Database(url.render_as_string(hide_password=False))
    with pytest.raises(Unavailable, match="the database is unavailable"):  # SQLSTATE 53300
        async with database.read() as away:
            await away.execute(select(1))
    assert await database.ask() == "is unavailable"
    await database.close()
    async with owner.write() as connection:
        await connection.execute(text("DROP ROLE crowd"))
    await owner.close()


async def test_sqlite_settings_are_durable(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    async with database.read() as connection:
        settings = {name: (await connection.execute(text(f"PRAGMA {name}"))).scalar_one() for name in names}
    assert settings == await database.transact(
        lambda connection: {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names}
    )
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}
    await database.close()


def test_only_two_databases_are_supported() -> None:
    assert driver_url("postgresql://u:p@h/d").drivername == "postgresql+asyncpg"
    assert driver_url("sqlite:///x.db").drivername == "sqlite+aiosqlite"
    with pytest.raises(ValueError, match="use sqlite or postgresql"):
        driver_url("mysql://h/d")


@pytest.mark.lab
@pytest.mark.parametrize("is_new_process", [False, True])
async def test_full_disk_is_named_and_commits_are_kept(tmp_path: Path, is_new_process: bool) -> None:
    rows = text("INSERT INTO t VALUES (zeroblob(1000))")
    with small_disk(tmp_path / "home", 4 << 20) as disk:
        database = Database(f"sqlite:///{disk.folder}/ledger.db")
        async with database.write() as connection:
            await connection.execute(text("CREATE TABLE t (x BLOB)"))
            await connection.execute(rows)
        if is_new_process:
            await database.close()
        disk.fill()
        if is_new_process:
            database = Database(f"sqlite:///{disk.folder}/ledger.db")
        num_rows = 1
        with pytest.raises(DiskFull) as full:
            for _ in range(100):  # the log that holds the first rows is on the disk already
                await database.transact(lambda connection: connection.execute(rows).rowcount)
                num_rows += 1
        assert str(disk.folder) in full.value.message and "full" in full.value.message
        with pytest.raises(DiskFull):
            async with database.write() as connection:
                await connection.execute(rows)
        assert database.disk_fault == full.value.message
        disk.free()
        disk.fill(num_free=512 << 10)  # enough for this row, not for the bills of the requests to come
        with pytest.raises(DiskFull):
            await database.transact(lambda connection: connection.execute(rows).rowcount)
        disk.free()
        async with database.write() as connection:
            await connection.execute(text("DELETE FROM t WHERE false"))
        assert database.disk_fault == ""
        await database.transact(lambda connection: connection.execute(rows).rowcount)
        async with database.read() as connection:
            num_kept = (await connection.execute(text("SELECT count(*) FROM t"))).scalar_one()
        assert num_kept == num_rows + 1
        await database.close()


T = TypeVar("T")


def test_linger_grows_with_the_last_batch_unless_a_pause_followed() -> None:
    assert linger_s(0, 0.0) == linger_s(1, 0.0) == linger_s(100, 1.0) == 0.0
    assert 0.0 < linger_s(2, 0.0) < linger_s(8, 0.0) < linger_s(100, 0.0)
    assert linger_s(100, 0.0) == linger_s(10_000, 0.0) < 0.05


async def test_waiting_writes_share_a_transaction(database: Database) -> None:
    batches: list[int] = []

    def apply(connection: Connection, writes: Sequence[int]) -> dict[int, Result]:
        batches.append(len(writes))
        connection.execute(update(table_versions).values(version=table_versions.c.version + len(writes)))
        return {index: NotFound("odd") if write % 2 else write * 10 for index, write in enumerate(writes)}

    async with GroupCommit(database, apply) as commits:
        answers = await asyncio.gather(*map(commits.do, range(40)), return_exceptions=True)
        assert await commits.do(100) == 1000
    assert answers[::2] == [write * 10 for write in range(0, 40, 2)]
    assert all(isinstance(answer, NotFound) for answer in answers[1::2])
    assert sum(batches) == 41 and len(batches) <= 3


async def test_write_that_breaks_its_transaction_fails_alone(database: Database) -> None:
    def apply(connection: Connection, writes: Sequence[int]) -> dict[int, Result]:
        connection.execute(update(table_versions).values(version=table_versions.c.version + len(writes)))
        return {index: 10 // write for index, write in enumerate(writes)}

    async with GroupCommit(database, apply) as commits:
        answers = await asyncio.gather(*map(commits.do, (1, 0, 5)), return_exceptions=True)
        assert (answers[0], answers[2]) == (10, 2)
        assert isinstance(answers[1], ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            await commits.do(0)
    versions = await database.transact(lambda connection: connection.execute(table_versions.select()).all())
    assert {row.version for row in versions} == {1 + 2}  # the failed writes were rolled back


class CountingDatabase(Database):
    num_transactions = 0

    async def transact(self, work: Callable[[Connection], T]) -> T:
        self.num_transactions += 1
        return await super().transact(work)


async def test_queued_writes_fail_with_a_silent_database(postgresql_url: str) -> None:
    async with SilentProxy(postgresql_url).serving() as proxy:
        database = CountingDatabase(proxy.url, time_limit_s=1.0)
        async with GroupCommit[int](database, lambda _, writes: dict.fromkeys(range(len(writes)), 0)) as commits:
            assert await commits.do(1) == 0
            proxy.fall_silent()
            num_before = database.num_transactions
            answers = await asyncio.gather(*map(commits.do, range(2560)), return_exceptions=True)  # ten batches
            assert all(isinstance(answer, Unavailable) for answer in answers)
            assert database.num_transactions == num_before + 1, "further batches waited for the time limit as well"
            proxy.speak()
            async with asyncio.timeout(HANG_S):
                while (await asyncio.gather(commits.do(1), return_exceptions=True))[0] != 0:
                    pass
        await database.close()


def test_head_is_alembics_head_and_revisions_rise() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_current_head() == HEAD
    revisions = [script.revision for script in scripts.walk_revisions()]
    assert revisions == sorted(revisions, reverse=True)


async def test_migrations_create_exactly_the_tables_and_a_default_price(database: Database) -> None:
    async with database.read() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync), metadata)
        )
        (row,) = (await connection.execute(select(prices))).all()
    assert differences == []
    assert (row.model, row.valid_from_unix_us) == ("", 0)


@pytest.fixture(params=DATABASES)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    server: str = request.getfixturevalue("postgres_template")
    asyncio.run(execute(server, "DROP DATABASE IF EXISTS empty"))
    asyncio.run(execute(server, "CREATE DATABASE empty"))
    return server.replace("/postgres", "/empty")


async def test_versions_of_earlier_releases_have_their_bases(empty_url: str) -> None:
    row = text(
        "INSERT INTO versions (version_id, description, stored_bytes, created_unix_us) VALUES (:id, :text, 1, 1)"
    )
    described = {
        "older": '{"version_id":"older"}',
        "model": '{"base_version_id":"","version_id":"model"}',
        "adapter": '{"version_id":"adapter","base_version_id":"model"}',
    }
    await asyncio.to_thread(migrate, empty_url, "0009")
    database = Database(empty_url)
    async with database.write() as connection:
        for version_id, description in described.items():
            await connection.execute(row, {"id": version_id, "text": description})
    await asyncio.to_thread(migrate, empty_url)
    async with database.write() as connection:  # by a gateway of an earlier release, which runs on
        await connection.execute(row, {"id": "later", "text": '{"base_version_id":"model"}'})
    async with database.read() as connection:
        bases = await connection.execute(select(versions.c.version_id, versions.c.base_version_id))
    assert set(bases) == {("older", None), ("model", None), ("adapter", "model"), ("later", "model")}
    await database.close()


async def test_ledger_of_earlier_releases_is_numbered_and_summed_by_hour(empty_url: str) -> None:
    hour, rows = 3_600_000_000, [("req-b", 0, 7, 5), ("req-b", 1, 7, 6), ("req-a", 0, 7, 1), ("req-c", 0, 2, 2)]
    group = ("k", "t/m", "price-default")
    await asyncio.to_thread(migrate, empty_url, "0010")
    database = Database(empty_url)
    async with database.write() as connection:
        await connection.execute(text("INSERT INTO tenants (tenant_id, name, created_unix_us) VALUES ('t', 't', 1)"))
        for name in ("req-a", "req-b", "req-c"):
            values = f"'{name}', 't', 'k', 't/m', 'v', 'price-default', 1, 9, 1, 'g', 1, 1"
            await connection.execute(text(f"INSERT INTO opened VALUES ({values})"))
        for name, choice, hours, cost in rows:
            values = f"'{name}', {choice}, 0, 't', 'k', 't/m', 'v', 'price-default', 1, 0, 3, {cost}, 'stop'"
            await connection.execute(text(f"INSERT INTO ledger VALUES ({values}, {hours * hour + cost})"))
    await asyncio.to_thread(migrate, empty_url)
    async with database.read() as connection:
        numbered = await connection.execute(select(ledger.c.ledger_id, ledger.c.request_id, ledger.c.choice))
        assert set(numbered) == {(1, "req-c", 0), (2, "req-a", 0), (3, "req-b", 0), (4, "req-b", 1)}
        sums = await connection.execute(select(usage_hours).order_by(usage_hours.c.hour_unix_us))
        assert [*sums] == [("t", 2 * hour, *group, 1, 1, 0, 3, 2), ("t", 7 * hour, *group, 2, 3, 0, 9, 12)]
        last = select(counters.c.last).where(counters.c.name == "ledger")
        assert (await connection.execute(last)).scalar_one() == 4
    await database.close()


async def test_schema_at_head_or_newer_is_unchanged(database: Database, database_url: str) -> None:
    await ensure_schema(database, database_url)
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await ensure_schema(database, database_url)  # an older gateway beside a newer one
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalars().all() == ["9999"]


@pytest.fixture
def own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not forked from a template of the tests, whose start would occupy the event loop for seconds."""
    monkeypatch.setattr(subprocess, "Popen", Program.__base__)


@pytest.mark.usefixtures("own_children")
async def test_concurrent_starts_migrate_once(postgres_template: str) -> None:
    url = postgres_template  # the server's own database, still empty
    databases = [Database(url) for _ in range(3)]
    await asyncio.gather(*(ensure_schema(database, url) for database in databases))
    async with databases[0].read() as connection:
        assert (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalars().all() == [HEAD]
    for database in databases:
        await database.close()


@pytest.mark.usefixtures("own_children")
async def test_failed_migration_names_the_cause(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/broken.db"
    database = Database(url)
    async with database.write() as connection:
        await connection.execute(text("CREATE TABLE tenants (x INTEGER)"))
    with pytest.raises(RuntimeError, match="table tenants already exists"):
        await ensure_schema(database, url)
    await database.close()


async def test_version_rises_when_its_transaction_commits(parts: AccountingRig) -> None:
    before = await parts.table_versions.confirmed("catalog")
    async with parts.database.write() as connection:
        await bump_version(connection, "catalog")
    assert await parts.table_versions.confirmed("catalog") == before  # confirmed a moment ago
    parts.table_versions.invalidate()
    assert await parts.table_versions.confirmed("catalog") == before + 1
    assert await parts.table_versions.confirmed("keys") == 1


async def test_concurrent_callers_share_a_query(parts: AccountingRig) -> None:
    asked = 0

    class Counting(TableVersions):
        async def _query(self) -> None:
            nonlocal asked
            asked += 1
            await super()._query()

    table_versions = Counting(parts.database, 60)
    await asyncio.gather(*(table_versions.confirmed("keys") for _ in range(20)))
    assert asked == 1


async def test_invalidation_during_a_query_causes_another(parts: AccountingRig) -> None:
    num_asked = 0

    class Doubted(TableVersions):
        async def _query(self) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                asking = asyncio.create_task(super()._query())
                await asyncio.sleep(0)
                self.invalidate()
                await asking
            else:
                await super()._query()

    table_versions = Doubted(parts.database, 60)
    for _ in range(3):
        await table_versions.confirmed("keys")
    assert num_asked == 2


async def test_abandoned_query_ends_before_the_database_closes(postgresql_url: str) -> None:
    has_ended = False

    class Noted(TableVersions):
        async def _query(self) -> None:
            nonlocal has_ended
            try:
                await super()._query()
            finally:
                has_ended = True

    async with SilentProxy(postgresql_url).serving() as proxy:
        database = Database(proxy.url)
        versions = Noted(database, 0.5)
        await versions.confirmed("keys")
        has_ended = False
        versions.invalidate()
        proxy.fall_silent()
        with pytest.raises(Unavailable, match="does not answer"):
            await versions.confirmed("keys")
        assert not has_ended
        await database.close()
        assert has_ended


def test_entry_is_valid_for_its_version_only() -> None:
    cache: VersionedCache[str, int] = VersionedCache(2)
    cache.put("a", 1, 10)
    assert cache.get("a", 1) == 10
    assert cache.get("a", 2) is None
    cache.put("a", 2, 11)
    assert cache.get("a", 2) == 11


def test_cache_evicts_the_least_recently_used() -> None:
    cache: VersionedCache[str, int] = VersionedCache(2)
    cache.put("a", 1, 1)
    cache.put("b", 1, 2)
    cache.get("a", 1)
    cache.put("c", 1, 3)
    assert (cache.get("a", 1), cache.get("b", 1), cache.get("c", 1)) == (1, None, 3)
