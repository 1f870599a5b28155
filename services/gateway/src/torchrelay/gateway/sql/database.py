"""The SQL engine of the process: SQLite or PostgreSQL, read and write transactions, errors mapped to ours.

SQLite runs in WAL mode with ``synchronous=FULL``: with NORMAL a power cut may lose the last commits, and a lost opened
row is a request delivered but never billed. The ledger's group commits amortize the fsync.

SQLAlchemy Core runs over asyncio drivers by ``greenlet_spawn``, as its ``AsyncEngine`` does. ``AsyncEngine`` itself
would import the ORM, which costs 8 MB.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Executable, Table, create_engine, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.util import greenlet_spawn

from torchrelay.common.disk import disk_full, free_bytes
from torchrelay.common.errors import DiskFull, Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.thread_pool import batch_executor

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from sqlalchemy.dialects import postgresql

log = get_logger(__name__)
T = TypeVar("T")
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
_FULL = "the database's disk is full; it works again once space is freed there"
_POSTGRES_DISK_FULL = "53100"
_SMALLEST_WRITE_BYTES = 64 << 10  # SQLite's shared memory file and a page
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000")


def driver_url(url: str) -> URL:
    """``url`` with its database's asyncio driver. Raises ``ValueError`` unless it is SQLite or PostgreSQL."""
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend not in _DRIVERS:
        raise ValueError(f"database_url: unsupported database {backend!r}; use sqlite or postgresql")
    return parsed.set(drivername=_DRIVERS[backend])


class SqlConnection:
    """A connection within a transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[*tuple[Any, ...]]:
        """The result, with its rows already fetched. Runs once per element if ``parameters`` is a sequence."""
        return await greenlet_spawn(self._connection.execute, statement, parameters)

    async def run_sync(self, call: Callable[[Connection], T]) -> T:
        """Calls ``call`` with the plain SQLAlchemy connection (for inspection)."""
        return await greenlet_spawn(call, self._connection)


class Database:
    """Owns the connection pools. ``read()``, ``write()`` and ``transact()`` are one transaction each."""

    def __init__(self, url: str) -> None:
        parsed = driver_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._folder = Path(parsed.database or ".").absolute().parent if self.is_sqlite else None
        self._thread: ThreadPoolExecutor | None = None
        if self.is_sqlite:
            self._engine = _sqlite_engine(parsed, 2)  # a writer and a reader, each with a thread and a page cache
            self._transact_engine = _sqlite_engine(parsed.set(drivername="sqlite"), 1)
            self._thread = batch_executor(1, "transact")
        else:
            # pool_pre_ping: a restarted database fails no request.
            self._engine = create_engine(
                parsed, pool_size=5, max_overflow=5, pool_pre_ping=True, pool_timeout=5, hide_parameters=True
            )
            self._transact_engine = self._engine
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[SqlConnection]:
        """A connection in a read-only transaction. Raises ``Unavailable`` if the database is unreachable."""
        with _mapped_errors(self._folder):
            async with self._connected() as connection:
                yield SqlConnection(connection)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[SqlConnection]:
        """A connection in a transaction, committed at the end of the block and rolled back by an exception."""
        with _mapped_errors(self._folder):
            async with self._one_writer(), self._connected() as connection:
                await greenlet_spawn(connection.execution_options, torchrelay_write=True)
                await greenlet_spawn(connection.begin)
                yield SqlConnection(connection)
                await greenlet_spawn(connection.commit)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        connection = await greenlet_spawn(self._engine.connect)
        try:
            yield connection
        finally:
            # Closing rolls back an uncommitted transaction; shielded, so that it also happens for a cancelled caller.
            await asyncio.shield(greenlet_spawn(connection.close))

    async def transact(self, work: Callable[[Connection], T]) -> T:
        """Runs ``work`` with a plain connection, in a transaction that is committed unless it raises.

        For frequent work: with SQLite it runs on one thread, which costs two thread switches in all, where each
        statement of ``write()`` costs about six.
        """
        with _mapped_errors(self._folder):
            async with self._one_writer():
                running = asyncio.ensure_future(self._transacted(work))
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    while not running.done():  # holds the writer lock until it ends, even if cancelled again
                        with suppress(asyncio.CancelledError):
                            await asyncio.wait({running})
                    if not running.cancelled():
                        running.exception()  # marks it as retrieved: the caller is gone, the work rolled back
                    raise

    async def _transacted(self, work: Callable[[Connection], T]) -> T:
        if self._thread is None:
            return await greenlet_spawn(_in_transaction, self._transact_engine, work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _in_transaction, self._transact_engine, work)

    def _one_writer(self) -> AbstractAsyncContextManager[Any]:
        return self._writing if self.is_sqlite else nullcontext()

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT with ON CONFLICT support in this database's dialect."""
        if self.is_sqlite:
            return sqlite.insert(table)
        from sqlalchemy.dialects import postgresql  # already loaded by the engine; with SQLite it would cost 3 MB

        return postgresql.insert(table)

    async def close(self) -> None:
        await greenlet_spawn(self._engine.dispose)
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._transact_engine.dispose)
            self._thread.shutdown(wait=False)


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


def is_disk_full(error: BaseException, folder: Path | None) -> bool:
    """Whether the database's disk is full. ``folder``: SQLite's."""
    cause = getattr(error, "orig", None) or error
    if folder is None:
        return getattr(cause, "sqlstate", "") == _POSTGRES_DISK_FULL
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):  # also what a full disk makes of its auxiliary files
        return free_bytes(folder) < _SMALLEST_WRITE_BYTES
    return code == sqlite3.SQLITE_FULL


@contextmanager
def _mapped_errors(folder: Path | None) -> Iterator[None]:
    """Maps lost connections to ``Unavailable``, a full disk to ``DiskFull``; errors of our own statements pass through.

    ``folder``: SQLite's.
    """
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout, OSError) as error:
        if is_disk_full(error, folder):
            full = DiskFull(_FULL) if folder is None else disk_full(folder)
            log.warning("ledger_disk_full", error=full.message)
            raise full from error
        log.warning("database_away", error=f"{type(error).__name__}: {error}"[:300])
        raise Unavailable("the database is unavailable; try again") from error
    except DBAPIError as error:
        if is_disk_full(error, folder):
            raise DiskFull(_FULL) from error
        if not error.connection_invalidated:
            raise
        raise Unavailable("the database connection was lost; try again") from error


def _set_pragmas(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # The driver is in autocommit mode and would begin only after the first read. A writer takes the lock at once, so
    # that it cannot fail half-way for it.
    write = connection.get_execution_options().get("torchrelay_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
