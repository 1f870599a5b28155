"""The one SQL engine of the process: SQLite or PostgreSQL, read and write transactions, errors of the house.

SQLite runs in WAL mode with ``synchronous=FULL``: with NORMAL a power cut may lose the last commits, and a lost opened
row is a request whose tokens were delivered and never billed. The ledger commits in groups, which pays for the fsync.

SQLAlchemy's Core runs here over its asyncio drivers by ``greenlet_spawn``, as its own ``AsyncEngine`` does. That one is
not used because importing it brings the ORM along: 8 MB of a process that is to stay small.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Executable, Table, create_engine, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.util import greenlet_spawn

from torchrelay.common.errors import Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.executor import batch_executor

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from sqlalchemy.dialects import postgresql

log = get_logger(__name__)
T = TypeVar("T")
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000")


def driver_url(url: str) -> URL:
    """``url`` with the asyncio driver for its database. Raises ``ValueError`` for any but SQLite and PostgreSQL."""
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend not in _DRIVERS:
        raise ValueError(f"database_url names {backend!r}: only sqlite and postgresql are supported")
    return parsed.set(drivername=_DRIVERS[backend])


class SqlConnection:
    """A connection within a transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[*tuple[Any, ...]]:
        """The result, its rows already read. Several ``parameters``: the statement once for each."""
        return await greenlet_spawn(self._connection.execute, statement, parameters)

    async def run_sync(self, call: Callable[[Connection], T]) -> T:
        """What ``call`` makes of the plain SQLAlchemy connection (for inspection and comparison)."""
        return await greenlet_spawn(call, self._connection)


class Database:
    """Owns the connections. ``read()``, ``write()`` and ``transact()`` are one transaction each."""

    def __init__(self, url: str) -> None:
        parsed = driver_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._thread: ThreadPoolExecutor | None = None
        if self.is_sqlite:
            self._engine = _sqlite_engine(parsed, 2)  # one writes, one reads: each is a thread and a page cache
            self._transact_engine = _sqlite_engine(parsed.set(drivername="sqlite"), 1)
            self._thread = batch_executor(1, "transact")
        else:
            # Connections are checked before use: a database that was restarted costs no request.
            self._engine = create_engine(
                parsed, pool_size=5, max_overflow=5, pool_pre_ping=True, pool_timeout=5, hide_parameters=True
            )
            self._transact_engine = self._engine
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[SqlConnection]:
        """A connection in a transaction that only reads. Raises ``Unavailable`` when the database is away."""
        with _house_errors():
            connection = await greenlet_spawn(self._engine.connect)
            try:
                yield SqlConnection(connection)
            finally:
                await asyncio.shield(greenlet_spawn(connection.close))

    @asynccontextmanager
    async def write(self) -> AsyncIterator[SqlConnection]:
        """A transaction, committed at the end of the block and rolled back by an exception.

        SQLite has one writer at a time: it takes the lock at its beginning, so that it cannot fail half-way for it.
        """
        with _house_errors():
            async with self._one_writer(), self._transaction() as connection:
                yield connection

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[SqlConnection]:
        connection = await greenlet_spawn(self._engine.connect)
        try:
            await greenlet_spawn(connection.execution_options, torchrelay_write=True)
            await greenlet_spawn(connection.begin)
            yield SqlConnection(connection)
            await greenlet_spawn(connection.commit)
        finally:
            # Closing rolls back what is not committed. Shielded: a cancelled caller leaves no transaction behind.
            await asyncio.shield(greenlet_spawn(connection.close))

    async def transact(self, work: Callable[[Connection], T]) -> T:
        """What ``work`` makes of a plain connection, in a transaction that is committed when it returns.

        It is rolled back when ``work`` raises. With SQLite all of it runs on one thread: it costs two switches of
        threads, where every statement of ``write()`` costs some six. For what is done often.
        """
        with _house_errors():
            async with self._one_writer():
                running = asyncio.ensure_future(self._transacted(work))
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    while not running.done():  # until then its caller is the one writer, however often it is cancelled
                        with suppress(asyncio.CancelledError):
                            await asyncio.wait({running})
                    if not running.cancelled():
                        running.exception()  # nobody is left to be told: it is rolled back
                    raise

    async def _transacted(self, work: Callable[[Connection], T]) -> T:
        if self._thread is None:
            return await greenlet_spawn(_in_transaction, self._transact_engine, work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _in_transaction, self._transact_engine, work)

    def _one_writer(self) -> AbstractAsyncContextManager[Any]:
        return self._writing if self.is_sqlite else nullcontext()

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT that knows ON CONFLICT, in this database's dialect."""
        if self.is_sqlite:
            return sqlite.insert(table)
        from sqlalchemy.dialects import postgresql  # loaded by the engine already; with SQLite it would cost 3 MB

        return postgresql.insert(table)

    async def close(self) -> None:
        await greenlet_spawn(self._engine.dispose)
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._transact_engine.dispose)
            self._thread.shutdown(wait=False)  # it has nothing to do any more


def _sqlite_engine(url: URL, pool_size: int) -> Engine:
    engine = create_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        hide_parameters=True,
        connect_args={"isolation_level": None, "timeout": 5.0},
    )
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _in_transaction(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.connect() as connection:
        connection.execution_options(torchrelay_write=True)
        with connection.begin():
            return work(connection)


@contextmanager
def _house_errors() -> Iterator[None]:
    """Turns "the database is away" into ``Unavailable``; faults of our own statements stay what they are."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout, OSError) as error:
        log.warning("database_away", error=f"{type(error).__name__}: {error}"[:300])
        raise Unavailable("the database is away; try again") from error
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
        raise Unavailable("the database went away; try again") from error


def _set_pragmas(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # The driver is in autocommit mode: it would begin late, after the first read.
    write = connection.get_execution_options().get("torchrelay_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
