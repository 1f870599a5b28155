from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.exc import IntegrityError, ProgrammingError

from tests.support.small_disk import small_disk
from torchrelay.common.errors import DiskFull, Unavailable
from torchrelay.gateway.sql.database import Database, driver_url
from torchrelay.gateway.sql.tables import balances, table_versions


async def test_a_write_is_committed_whole_or_not_at_all(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with database.write() as connection:
            await connection.execute(update(table_versions).values(version=99))
            _ = 1 // 0
    async with database.read() as connection:
        assert set((await connection.execute(select(table_versions.c.version))).scalars()) == {1}


async def test_writes_at_once_lose_nothing(database: Database) -> None:
    async def raise_it() -> None:
        async with database.write() as connection:
            await connection.execute(update(table_versions).values(version=table_versions.c.version + 1))

    await asyncio.gather(*(raise_it() for _ in range(40)))
    async with database.read() as connection:
        assert set((await connection.execute(select(table_versions.c.version))).scalars()) == {41}


async def test_a_transaction_in_one_piece_is_committed_whole_or_not_at_all(database: Database) -> None:
    def raise_version(connection: Connection) -> int:
        return connection.execute(update(table_versions).values(version=7)).rowcount

    def fail(connection: Connection) -> None:
        raise_version(connection)
        _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        await database.transact(fail)
    query = select(table_versions.c.version)
    assert set(await database.transact(lambda connection: connection.execute(query).scalars().all())) == {1}
    assert await database.transact(raise_version) == 2
    async with database.read() as connection:
        assert set((await connection.execute(query)).scalars()) == {7}


async def test_writes_of_both_kinds_at_once_lose_nothing(database: Database) -> None:
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


async def test_a_caller_that_is_cancelled_is_the_writer_until_its_transaction_has_ended(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, about: complaints.append(about["message"]))

    def work(_connection: Connection) -> None:
        begun.set()
        assert may_end.wait(10)
        ended.set()
        raise ValueError("the caller is gone")

    writing = asyncio.ensure_future(database.transact(work))
    assert await asyncio.to_thread(begun.wait, 10)
    next_one = asyncio.ensure_future(database.transact(lambda _: ended.is_set()))
    for _ in range(2):
        writing.cancel()
        await asyncio.sleep(0.05)
    assert not writing.done() and not next_one.done()
    may_end.set()
    assert await next_one
    await asyncio.wait({writing})
    assert writing.cancelled()
    gc.collect()
    assert not complaints
    await database.close()


async def test_foreign_keys_hold(database: Database) -> None:
    with pytest.raises(IntegrityError):
        async with database.write() as connection:
            await connection.execute(balances.insert().values(tenant_id="nobody", spent_nano=0))


async def test_a_database_that_is_away_is_unavailable_and_a_fault_of_ours_is_not(database: Database) -> None:
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


async def test_sqlite_keeps_what_it_committed(tmp_path: Path) -> None:
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
async def test_a_full_disk_is_named_and_nothing_committed_is_lost(tmp_path: Path, is_new_process: bool) -> None:
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
            for _ in range(100):  # the log in which the first ones fit is on the disk already
                await database.transact(lambda connection: connection.execute(rows).rowcount)
                num_rows += 1
        assert str(disk.folder) in full.value.message and "full" in full.value.message
        with pytest.raises(DiskFull):
            async with database.write() as connection:
                await connection.execute(rows)
        disk.free()
        await database.transact(lambda connection: connection.execute(rows).rowcount)
        async with database.read() as connection:
            found = (await connection.execute(text("SELECT count(*) FROM t"))).scalar_one()
        assert found == num_rows + 1
        await database.close()
