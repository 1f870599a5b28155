"""The SQL engine of the process: SQLite or PostgreSQL, read and write transactions, errors mapped to ours.

SQLite runs in WAL mode with ``synchronous=FULL``: with NORMAL a power cut may lose the last commits, and a lost opened
row is a request delivered but never billed. The ledger's group commits amortize the fsync.

Each transaction has a time limit. When the database does not answer within it, the caller gets ``Unavailable`` and the
connection is closed in the background.

SQLAlchemy Core runs over asyncio drivers by ``greenlet_spawn``, as its ``AsyncEngine`` does. ``AsyncEngine`` itself
would import the ORM, which costs 8 MB.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Executable, Table, create_engine, event, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.util import greenlet_spawn

from torchrelay.common.errors import DiskFull, Unavailable
from torchrelay.common.host.disk import disk_full, free_bytes
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
# Classes of SQLSTATE: no connection, no resources (such as connections), and an operator's action (such as a start).
_POSTGRES_AWAY = ("08", "53", "57")
_SMALLEST_WRITE_BYTES = 64 << 10  # SQLite's shared memory file and a page
# On SQLite's disk, once it was full, before requests are opened again: a freed page would admit a request whose bill
# does not fit.
_SPACE_AFTER_FULL_BYTES = 1 << 20
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000")
TIME_LIMIT_S = 5.0
ANSWER_LIMIT_S = 2.5  # of queries that every request waits for
REPORT_LIMIT_S = 300.0  # of sums over a ledger of millions of rows
_CONNECT_LIMIT_S = 2.0
_CLOSE_LIMIT_S = 1.0


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
        self._running: asyncio.Future[Any] | None = None  # the last statement

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[*tuple[Any, ...]]:
        """The result, with its rows already fetched. Runs once per element if ``parameters`` is a sequence."""
        return await self._run(self._connection.execute, statement, parameters)

    async def run_sync(self, call: Callable[[Connection], T]) -> T:
        """Calls ``call`` with the plain SQLAlchemy connection (for inspection)."""
        return await self._run(call, self._connection)

    async def begin_writing(self) -> None:
        await self._run(lambda: self._connection.execution_options(torchrelay_write=True).begin())

    async def commit(self) -> None:
        await self._run(self._connection.commit)

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        """Runs a statement. A caller that is cancelled or times out leaves at once, and its statement is broken off."""
        self._running = asyncio.ensure_future(greenlet_spawn(call, *args))
        try:
            return await asyncio.shield(self._running)
        except asyncio.CancelledError:
            await self._break_off()
            raise

    async def _break_off(self) -> None:
        driver: Any = self._connection.connection.driver_connection
        if hasattr(driver, "interrupt"):
            await driver.interrupt()  # of SQLite: the statement fails, unless it waits for the disk
        else:
            driver.terminate()  # of asyncpg: sends nothing to the server, which may hang

    async def close(self) -> None:
        """Rolls back what is not committed, once the last statement has ended."""
        if self._running is not None:
            await asyncio.wait({self._running})
            if not self._running.cancelled():
                self._running.exception()  # marks it as retrieved
        await greenlet_spawn(self._connection.close)


class Database:
    """Owns the connection pools. ``read()``, ``write()`` and ``transact()`` are one transaction each.

    A transaction that takes longer than ``time_limit_s`` raises ``Unavailable``; whether it is committed is then open.
    """

    def __init__(self, url: str, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._running: set[asyncio.Future[Any]] = set()
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
            self._engine = _postgresql_engine(parsed, time_limit_s)
            self._transact_engine = self._engine
        self._writing = asyncio.Lock()
        self.disk_fault = ""  # why the last write failed, if the disk was full

    @asynccontextmanager
    async def read(self, time_limit_s: float | None = None) -> AsyncIterator[SqlConnection]:
        """A connection in a read-only transaction. Raises ``Unavailable`` if the database is unreachable or silent.

        ``time_limit_s``: instead of this database's own.
        """
        async with self._limited(time_limit_s or self._time_limit_s), self._connected() as connection:
            yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[SqlConnection]:
        """A connection in a transaction, committed at the end of the block and rolled back by an exception."""
        async with self._limited(self._time_limit_s):
            await self._begin_writing()
            try:
                async with self._connected() as connection:
                    await connection.begin_writing()
                    yield connection
                    await connection.commit()
                    if self.disk_fault and self._has_space():
                        self.disk_fault = ""
            finally:
                self._end_writing()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[SqlConnection]:
        connection = SqlConnection(await greenlet_spawn(self._engine.connect))
        try:
            yield connection
        finally:
            closing = self.own(asyncio.ensure_future(connection.close()))
            await asyncio.wait({closing}, timeout=_CLOSE_LIMIT_S)

    async def transact(self, work: Callable[[Connection], T]) -> T:
        """Runs ``work`` with a plain connection, in a transaction that is committed unless it raises.

        Raises ``DiskFull`` without a try while SQLite's disk, once full, has less than 1 MiB of space.

        For frequent work: with SQLite it runs on one thread, which costs two thread switches in all, where each
        statement of ``write()`` costs about six. The work of a caller that is cancelled goes on.
        """
        async with self._limited(self._time_limit_s) as limit:
            if self.disk_fault and self._folder is not None and not self._has_space():
                raise disk_full(self._folder)
            await self._begin_writing()
            running = self.own(asyncio.ensure_future(self._transacted(work)))
            running.add_done_callback(lambda _: self._end_writing())  # not before, even if the caller leaves
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                if limit.expired() and self._thread is None:  # a thread cannot be stopped
                    running.cancel()
                raise

    async def _transacted(self, work: Callable[[Connection], T]) -> T:
        if self._thread is None:
            return await greenlet_spawn(_in_transaction, self._transact_engine, work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _in_transaction, self._transact_engine, work)

    def _has_space(self) -> bool:
        return self._folder is None or free_bytes(self._folder) >= _SPACE_AFTER_FULL_BYTES

    async def _begin_writing(self) -> None:
        """SQLite has one writer at a time."""
        if self.is_sqlite:
            await self._writing.acquire()

    def _end_writing(self) -> None:
        if self.is_sqlite:
            self._writing.release()

    def own(self, work: asyncio.Future[T]) -> asyncio.Future[T]:
        """Holds a reference to work whose caller may leave before it ends."""
        self._running.add(work)
        work.add_done_callback(self._ended)
        return work

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._running.discard(work)
        if not work.cancelled():
            work.exception()  # marks it as retrieved

    async def answer(self, query: Coroutine[Any, Any, T], time_limit_s: float = ANSWER_LIMIT_S) -> T:
        """The result of a query of this database; raises its error, or ``Unavailable`` after ``time_limit_s``.

        An orderly end of a connection may take seconds; the caller does not wait for that either.
        """
        asking = self.own(asyncio.ensure_future(query))
        async with self._limited(time_limit_s) as limit:
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:
                if limit.expired():
                    asking.cancel()
                raise

    @asynccontextmanager
    async def _limited(self, time_limit_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Maps connection failures and silence to ``Unavailable``, a full disk to ``DiskFull``.

        Errors of our own statements pass through.
        """
        limit = asyncio.timeout(time_limit_s)
        try:
            async with limit:
                yield limit
        except (OperationalError, InterfaceError, PoolTimeout, OSError) as error:
            if is_disk_full(error, self._folder):
                full = DiskFull(_FULL) if self._folder is None else disk_full(self._folder)
                log.warning("ledger_disk_full", error=full.message)
                self.disk_fault = full.message
                raise full from error
            log.warning("database_away", error=f"{type(error).__name__}: {error}"[:300])
            is_silent = limit.expired() or isinstance(error, TimeoutError)
            what = "does not answer" if is_silent else "is unavailable"
            raise Unavailable(f"the database {what}; try again") from error
        except DBAPIError as error:
            if is_disk_full(error, self._folder):
                self.disk_fault = _FULL
                raise DiskFull(_FULL) from error
            if error.connection_invalidated:
                raise Unavailable("the database connection was lost; try again") from error
            if not _sqlstate(error).startswith(_POSTGRES_AWAY):
                raise
            log.warning("database_away", error=f"{type(error).__name__}: {error}"[:300])
            raise Unavailable("the database is unavailable; try again") from error

    async def ask(self) -> str:
        """The fault of the database; empty if it answers."""

        async def ping() -> None:
            async with self.read() as connection:
                await connection.execute(select(1))

        try:
            await self.answer(ping())
        except Unavailable as error:
            return "does not answer" if is_silence(error) else "is unavailable"
        return ""

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT with ON CONFLICT support in this database's dialect."""
        if self.is_sqlite:
            return sqlite.insert(table)
        from sqlalchemy.dialects import postgresql  # already loaded by the engine; with SQLite it would cost 3 MB

        return postgresql.insert(table)

    async def close(self) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=self._time_limit_s)
        await greenlet_spawn(self._engine.dispose)
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._transact_engine.dispose)
            self._thread.shutdown(wait=False)


def is_silence(error: Unavailable) -> bool:
    """Whether the database did not answer in time, as opposed to being unreachable."""
    return isinstance(error.__cause__, TimeoutError)


def _sqlite_engine(url: URL, pool_size: int) -> Engine:
    engine = create_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=TIME_LIMIT_S,
        hide_parameters=True,
        connect_args={"isolation_level": None, "timeout": TIME_LIMIT_S},
    )
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _postgresql_engine(url: URL, time_limit_s: float) -> Engine:
    # The limits of the server end statements whose caller has left, or whose gateway vanished.
    settings = {"statement_timeout": f"{REPORT_LIMIT_S:.0f}s", "idle_in_transaction_session_timeout": "60s"}
    limits = {"timeout": _CONNECT_LIMIT_S, "command_timeout": REPORT_LIMIT_S, "server_settings": settings}
    return create_engine(
        url,
        pool_size=5,
        max_overflow=5,
        pool_pre_ping=True,
        pool_timeout=time_limit_s,
        hide_parameters=True,
        connect_args=limits,
    )


def _in_transaction(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.connect() as connection:
        connection.execution_options(torchrelay_write=True)
        with connection.begin():
            return work(connection)


def is_disk_full(error: BaseException, folder: Path | None) -> bool:
    """Whether the database's disk is full. ``folder``: SQLite's."""
    if folder is None:
        return _sqlstate(error) == _POSTGRES_DISK_FULL
    cause = getattr(error, "orig", None) or error
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):  # a full disk also causes these for auxiliary files
        return free_bytes(folder) < _SMALLEST_WRITE_BYTES
    return code == sqlite3.SQLITE_FULL


def _sqlstate(error: BaseException) -> str:
    """PostgreSQL's code of the error; empty if it has none."""
    return getattr(getattr(error, "orig", None) or error, "sqlstate", None) or ""


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
