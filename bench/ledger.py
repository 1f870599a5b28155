"""The ledger at ten million rows: usage of a month, keys beside it, exports, and whether the books agree.

    python bench/ledger.py [--quick]

A SQLite file is filled in bulk: a month of requests of fifty tenants, each with two keys and four models, and its
sums by hour. What is measured are the gateway's own functions, in this process.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from sqlalchemy import text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, parser_of, percentile, progress
from torchrelay.gateway.auth.api_keys import ApiKeys
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.billing.bills import month_bounds
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.billing.usage_export import Format, encoded, exported_pages
from torchrelay.gateway.billing.usage_query import GroupBy, UsageFilter, usage_sums
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.schema import ensure_schema
from torchrelay.gateway.sql.table_versions import TableVersions

NUM_TENANTS, NUM_KEYS, NUM_MODELS = 50, 2, 4
MONTH = "2026-10"
EDGE_US = 17 * 60_000_000  # of a period that begins and ends between two hours
CHUNK_ROWS = 500_000
PAUSE_S = 0.005  # between two keys
MAX_EXPORTED = 100_000
PEPPER = b"p" * 32
FILL_LIMIT_S = 900.0
GROUPS: tuple[GroupBy, GroupBy] = ("model", "key")
EXPORTED: tuple[Format, Format] = ("jsonl", "focus")

OPENED = """
    WITH RECURSIVE row(i) AS (SELECT :first UNION ALL SELECT i + 1 FROM row WHERE i < :last)
    INSERT INTO opened (request_id, tenant_id, key_id, model, version_id, price_id, num_prompt_tokens, max_tokens,
        num_choices, gateway_id, opened_unix_us, settled_unix_us)
    SELECT printf('req-%020d', i), t.tenant_id, 'key-' || (i / 3 % :keys) || '-' || t.name,
        t.name || '/model-' || (i / 7 % :models), 'version', 'price-default', 20 + i * 31 % 900, 400, 1, 'gateway',
        :begin + :length / :num * i, :begin + :length / :num * i
    FROM row JOIN (SELECT tenant_id, name, row_number() OVER (ORDER BY name) - 1 AS number FROM tenants) AS t
        ON t.number = i * 2654435761 % 4294967296 % :tenants"""
LEDGER = """
    INSERT INTO ledger SELECT request_id, 0, 0, tenant_id, key_id, model, version_id, price_id, num_prompt_tokens,
        num_prompt_tokens / 4, number % 400, (num_prompt_tokens - num_prompt_tokens / 4) * 100
        + num_prompt_tokens / 4 * 25 + number % 400 * 400, 'stop', settled_unix_us, number
    FROM (SELECT *, 1 + CAST(substr(request_id, 5) AS INTEGER) AS number FROM opened
        WHERE request_id BETWEEN printf('req-%020d', :first) AND printf('req-%020d', :last))"""
SUMS = (
    """INSERT INTO usage_hours SELECT tenant_id, settled_unix_us - settled_unix_us % 3600000000, key_id, model,
        price_id, count(*), sum(num_prompt_tokens), sum(num_cached_prompt_tokens), sum(num_output_tokens),
        sum(cost_nano)
        FROM ledger GROUP BY 1, 2, 3, 4, 5""",
    """UPDATE balances SET spent_nano = (SELECT coalesce(sum(cost_nano), 0) FROM usage_hours
        WHERE usage_hours.tenant_id = balances.tenant_id)""",
    "UPDATE counters SET last = (SELECT count(*) FROM ledger) WHERE name = 'ledger'",
)
INDEXES = {
    "ix_ledger_tenant_number": "CREATE INDEX {} ON ledger (tenant_id, ledger_id)",
    "ix_ledger_ledger_id": "CREATE UNIQUE INDEX {} ON ledger (ledger_id)",
    "ix_ledger_tenant_settled": "CREATE INDEX {} ON ledger (tenant_id, settled_unix_us)",
}


async def fill(url: str, num_rows: int) -> list[str]:
    """Fills the tables; returns a key of each tenant."""
    database, tokens = Database(url, FILL_LIMIT_S), []
    await ensure_schema(database, url)
    tenants, keys = Tenants(database), ApiKeys(database, TableVersions(database, 0.5), PEPPER)
    for index in range(NUM_TENANTS):
        tenant = await tenants.create(f"tenant-{index:02}")
        tokens.append((await keys.create(tenant.tenant_id))[1])
    begin, end = month_bounds(MONTH)
    numbers = {"begin": begin, "length": end - begin, "num": num_rows}
    numbers |= {"tenants": NUM_TENANTS, "keys": NUM_KEYS, "models": NUM_MODELS}

    async def run(statement: str, **values: int) -> None:
        await database.transact(lambda connection: connection.execute(text(statement), values).close())

    for name in INDEXES:
        await run(f"DROP INDEX {name}")
    for first in range(0, num_rows, CHUNK_ROWS):
        last = min(first + CHUNK_ROWS, num_rows) - 1
        await run(OPENED, first=first, last=last, **numbers)
        await run(LEDGER, first=first, last=last)
        progress(f"{last + 1:,} rows")
    for name, statement in INDEXES.items():
        await run(statement.format(name))
    for statement in SUMS:
        await run(statement)
    await database.close()
    return tokens


async def median_ms(work: Callable[[], Awaitable[object]], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        await work()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


async def usage_times_ms(database: Database) -> dict[str, float]:
    """The times of usage queries, by who asks and for what: for the month, and for a period that ends between hours."""
    begin, end = month_bounds(MONTH)
    tenant = await Tenants(database).by_name("tenant-00")
    times = {}
    for asker, tenant_id in (("tenant", tenant.tenant_id), ("admin", None)):
        for period, edge in (("month", 0), ("edges", EDGE_US)):
            filter_ = UsageFilter(tenant_id, from_unix_us=begin + edge, to_unix_us=end - edge)
            for group_by in GROUPS:
                work = partial(usage_sums, database, filter_, group_by)
                times[f"{asker} {period} by {group_by}"] = await median_ms(work)
    return times


async def authentication_times_ms(database: Database, tokens: list[str], seconds: float) -> tuple[list[float], int]:
    """The times of checks of keys that no cache has, beside usage queries; and the number of these."""
    begin, end = month_bounds(MONTH)
    until, times, num_queries = time.perf_counter() + seconds, [], 0

    async def query() -> None:
        nonlocal num_queries
        while time.perf_counter() < until:
            await usage_sums(database, UsageFilter(from_unix_us=begin, to_unix_us=end), GROUPS[num_queries % 2])
            num_queries += 1

    async def authenticate() -> None:
        versions, num = TableVersions(database, 0.5), 0
        while time.perf_counter() < until:
            keys = ApiKeys(database, versions, PEPPER)  # with an empty cache
            started = time.perf_counter()
            await keys.authenticate(f"Bearer {tokens[num % len(tokens)]}")
            times.append((time.perf_counter() - started) * 1e3)
            num += 1
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(query())
        group.create_task(authenticate())
    return times, num_queries


async def exported_per_s(database: Database, format_: Format, num_rows: int) -> float:
    begin, num_exported = time.perf_counter(), 0
    async for rows in exported_pages(database, UsageFilter(), 0, num_rows, has_own_numbers=False):
        encoded(rows, format_)
        num_exported += len(rows)
    return num_exported / (time.perf_counter() - begin)


async def measure(folder: Path, num_rows: int, seconds: float) -> None:
    url = f"sqlite:///{folder}/ledger.db"
    begin = time.perf_counter()
    tokens = await fill(url, num_rows)
    fill_s = time.perf_counter() - begin
    database = Database(url)
    usage_ms = await usage_times_ms(database)
    for what, took_ms in usage_ms.items():
        progress(f"usage, {what}: {took_ms:.1f} ms")
    slowest = max((what for what in usage_ms if "month" in what), key=lambda what: usage_ms[what])
    slowest_edges = max(usage_ms, key=lambda what: usage_ms[what])
    key_ms, num_queries = await authentication_times_ms(database, tokens, seconds)
    num_exported = min(num_rows, MAX_EXPORTED)
    jsonl, focus = [await exported_per_s(database, format_, num_exported) for format_ in EXPORTED]
    begin = time.perf_counter()
    books = await reconcile(database)
    reconcile_s = time.perf_counter() - begin
    await database.close()
    difference = books.difference_nano + len(books.faults) + abs(books.num_ledger_rows - num_rows)
    checks = [
        Check("usage_10m_ms", usage_ms[slowest], "ms", 200, f"the slowest of four: {slowest}"),
        Check("usage_between_hours_ms", usage_ms[slowest_edges], "ms", None, "a period that ends between two hours"),
        Check("auth_p99_beside_usage_ms", percentile(key_ms, 99), "ms", 20, f"{num_queries} sums of all tenants"),
        Check("ledger_difference", difference, "nano", 0, "with faults and missing rows, of which there are none"),
        Check("export_rows_per_s", jsonl, "/s", None, "JSON lines"),
        Check("export_focus_rows_per_s", focus, "/s", None, "of the ledger, up to three charges each"),
        Check("reconcile_s", reconcile_s, "s"),
        Check("fill_s", fill_s, "s"),
    ]
    size = (folder / "ledger.db").stat().st_size
    finish("ledger", {"rows": num_rows, "gigabytes": round(size / 1e9, 1), "keys": len(key_ms)}, checks)


def main() -> None:
    quick = parser_of(__doc__, "300,000 rows, under 50 s").parse_args().quick
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        asyncio.run(measure(Path(folder), 300_000 if quick else 10_000_000, 5 if quick else 20))


if __name__ == "__main__":
    main()
