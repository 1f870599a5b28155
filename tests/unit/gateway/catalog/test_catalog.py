"""Models, their versions, settings and adapters, and the weekly times of a greater minimum."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, update

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from torchrelay.gateway.auth.api_keys import ADMIN
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.catalog import Catalog
from torchrelay.gateway.catalog.model_settings import ModelSettings
from torchrelay.gateway.catalog.schedules import ScheduleEntry, parse_entry
from torchrelay.gateway.core import LatencyTargets, ModelShape, Principal, PublishedModel, Version
from torchrelay.gateway.inference.execution.attempt import model_version
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import retired_versions, versions


def version(name: str = "v1") -> Version:
    return Version(
        version_id=name,
        pack_id=f"pack-{name}",
        pack_bytes=100,
        architecture="Qwen2ForCausalLM",
        dtype="bfloat16",
        shape=ModelShape(2, 1, 8, 2, 128, 64),
        routing_block_tokens=64,
        stored_bytes=110,
        eos_token_ids=(1, 2),
        file_digests={"tokenizer.json": "abc"},
    )


async def publish(parts: AccountingRig, name: str, what: Version, scaling: ModelSettings = ModelSettings()) -> None:  # noqa: B008
    async with parts.database.write() as connection:
        await parts.catalog.publish_in(connection, parts.acme.tenant_id, name, what, scaling)
    parts.catalog.published()


@pytest.fixture
def caller(parts: AccountingRig) -> Principal:
    return Principal(parts.acme.tenant_id, "acme", "key-1")


async def retired(parts: AccountingRig) -> set[str]:
    async with parts.database.read() as connection:
        return set((await connection.execute(select(retired_versions.c.version_id))).scalars())


async def test_published_model_is_resolved_with_all_fields(parts: AccountingRig, caller: Principal) -> None:
    await publish(parts, "glossary", version(), ModelSettings(idle_timeout_s=4))
    model = await parts.catalog.resolve(caller, "glossary")
    assert (model.name, model.tenant_id, model.version) == ("acme/glossary", parts.acme.tenant_id, version())
    assert (model.idle_timeout_s, model.max_instances, model.price.price_id) == (4, 0, "price-default")
    assert await parts.catalog.resolve(caller, "acme/glossary") is model  # cached
    assert await parts.catalog.models(caller) == [model] == await parts.catalog.models(ADMIN)


async def test_other_names_are_not_found(parts: AccountingRig, caller: Principal) -> None:
    await publish(parts, "glossary", version())
    for name in ("", "/", "a/b/c", "acme/", "/glossary", "other/glossary", "acme/absent", "acme", "a\0b", "\ud800"):
        with pytest.raises(NotFound):
            await parts.catalog.resolve(caller, name)


async def test_republishing_replaces_version_and_keeps_settings(parts: AccountingRig, caller: Principal) -> None:
    await publish(parts, "glossary", version("v1"), ModelSettings(idle_timeout_s=4, max_instances=2, engine="vllm"))
    elsewhere = Catalog(parts.database, TableVersions(parts.database, confirm_s=0), parts.prices)
    before = await elsewhere.resolve(caller, "glossary")
    assert before.targets == LatencyTargets()
    await parts.catalog.change_settings(before, ModelSettings(standard_ttft_s=0.5, tbt_target_s=0.05))
    await publish(parts, "glossary", version("v2"), ModelSettings(max_instances=3))
    for catalog in (parts.catalog, elsewhere):
        after = await catalog.resolve(caller, "glossary")
        assert (after.version.version_id, after.idle_timeout_s, after.max_instances) == ("v2", 4, 3)
        assert after.targets == LatencyTargets(standard_ttft_s=0.5, tbt_target_s=0.05)
        assert after.created_unix_us == before.created_unix_us
        assert (after.engine, model_version(after).scaling.engine) == ("vllm", "vllm")
    assert model_version(replace(after, engine="auto")).scaling.engine == ""
    assert await retired(parts) == {"v1"}
    await publish(parts, "glossary", version("v1"))
    assert await retired(parts) == {"v2"}


async def test_model_is_rolled_back_to_a_replaced_version(parts: AccountingRig, caller: Principal) -> None:
    for name in ("v1", "v2", "v3"):
        await publish(parts, "glossary", version(name), ModelSettings(idle_timeout_s=4))
    model = await parts.catalog.resolve(caller, "glossary")
    replaced = await parts.catalog.replaced(model)
    assert [each.version for each in replaced] == [version("v2"), version("v1")]
    assert replaced[0].kept_until_unix_us - replaced[0].replaced_unix_us == 540 * 10**6
    await parts.catalog.roll_back(model, "v1")
    after = await parts.catalog.resolve(caller, "glossary")
    assert (after.version, after.idle_timeout_s) == (version("v1"), 4)
    assert await retired(parts) == {"v2", "v3"}
    assert [each.version for each in await parts.catalog.replaced(after)] == [version("v3"), version("v2")]
    with pytest.raises(NotFound):
        await parts.catalog.roll_back(after, "v4")
    assert await asyncio.gather(*(parts.catalog.roll_back(model, "v1") for _ in range(6))) == [False] * 6
    assert len(await parts.catalog.replaced(after)) == 2
    await publish(parts, "glossary", version("v1"))  # unchanged
    assert len(await parts.catalog.replaced(after)) == 2
    await parts.catalog.delete(after)
    with pytest.raises(NotFound):
        await parts.catalog.roll_back(after, "v2")
    await publish(parts, "glossary", version("v1"))
    assert await parts.catalog.replaced(await parts.catalog.resolve(caller, "glossary")) == []


async def test_rollback_that_needs_more_storage_keeps_to_the_quota(parts: AccountingRig, caller: Principal) -> None:
    zoo = await parts.tenants.create("zoo")
    async with parts.database.write() as connection:
        await parts.catalog.publish_in(connection, zoo.tenant_id, "same", version("v1"), ModelSettings())
    for name in ("v1", "v2", "v3"):
        await publish(parts, "glossary", version(name))
    model = await parts.catalog.resolve(caller, "glossary")
    await parts.tenants.change("acme", {"storage_quota_bytes": 200})  # v2 is retired: v2 and v3 have 220 bytes
    with pytest.raises(QuotaExceeded) as refused:
        await parts.catalog.roll_back(model, "v1")  # which counts for zoo only
    assert refused.value.field == "version"
    assert (await parts.catalog.resolve(caller, "glossary")).version.version_id == "v3"
    await parts.catalog.roll_back(model, "v2")  # which counts already
    await parts.tenants.change("acme", {"storage_quota_bytes": 330})
    await parts.catalog.roll_back(model, "v1")
    assert (await parts.catalog.resolve(caller, "glossary")).version.version_id == "v1"


async def test_versions_to_be_freed_are_no_target_of_a_rollback(parts: AccountingRig, caller: Principal) -> None:
    """Although another model uses the version: that must not show."""
    soon = Catalog(parts.database, parts.table_versions, parts.prices, retired_s=0)
    await publish(parts, "other", version("v1"))
    for name in ("v1", "v2"):
        await publish(parts, "glossary", version(name))
    model = await parts.catalog.resolve(caller, "glossary")
    assert await soon.replaced(model) == []
    with pytest.raises(NotFound):
        await soon.roll_back(model, "v1")
    assert [each.version.version_id for each in await parts.catalog.replaced(model)] == ["v1"]


async def test_version_is_retired_with_its_last_model(parts: AccountingRig, caller: Principal) -> None:
    await publish(parts, "one", version())
    await publish(parts, "two", version())
    await parts.catalog.delete(await parts.catalog.resolve(caller, "one"))
    assert await retired(parts) == set()
    two = await parts.catalog.resolve(caller, "two")
    await parts.catalog.delete(two)
    assert await retired(parts) == {"v1"}
    with pytest.raises(NotFound):
        await parts.catalog.delete(two)
    with pytest.raises(NotFound):
        await parts.catalog.change_settings(two, ModelSettings(max_instances=1))


async def test_delete_retires_the_newest_version_also_of_concurrent_deletes(
    parts: AccountingRig, caller: Principal
) -> None:
    await publish(parts, "glossary", version("v1"))
    read_before = await parts.catalog.resolve(caller, "glossary")
    await publish(parts, "glossary", version("v2"))
    await parts.catalog.delete(read_before)
    assert await retired(parts) == {"v1", "v2"}
    for name in ("one", "two"):
        await publish(parts, name, version("v3"))
    resolved = [await parts.catalog.resolve(caller, name) for name in ("one", "two")]
    await asyncio.gather(*map(parts.catalog.delete, resolved))
    assert await retired(parts) == {"v1", "v2", "v3"}


async def test_other_gateway_sees_changes_after_its_confirmation(parts: AccountingRig, caller: Principal) -> None:
    now = 0.0
    table_versions = TableVersions(parts.database, 0.5, lambda: now)
    elsewhere = Catalog(parts.database, table_versions, Prices(parts.database, table_versions))
    await publish(parts, "glossary", version("v1"))
    await elsewhere.resolve(caller, "glossary")
    await publish(parts, "glossary", version("v2"))
    price = await parts.prices.add("acme/glossary", 1, 2, 3)
    assert (await elsewhere.resolve(caller, "glossary")).version.version_id == "v1"
    now = 0.5
    seen = await elsewhere.resolve(caller, "glossary")
    assert (seen.version.version_id, seen.price) == ("v2", price)


async def test_change_of_a_tenant_leaves_models_of_others_cached(
    parts: AccountingRig, caller: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await parts.tenants.create("zoo")
    visitor = Principal(other.tenant_id, "zoo", "key-2")
    await publish(parts, "glossary", version())
    async with parts.database.write() as connection:
        await parts.catalog.publish_in(connection, other.tenant_id, "animals", version(), ModelSettings())

    looked_up: list[str] = []

    class Noted(Catalog):
        async def _look_up(self, tenant: str, model: str) -> PublishedModel | None:
            looked_up.append(model)
            return await super()._look_up(tenant, model)

    table_versions = TableVersions(parts.database, 60.0)
    elsewhere = Noted(parts.database, table_versions, Prices(parts.database, table_versions))

    async def seen() -> list[str]:
        """The models that another gateway reads anew, though nothing has told it of changes."""
        looked_up.clear()
        table_versions.invalidate()
        for principal, name in ((caller, "glossary"), (visitor, "animals")):
            await elsewhere.resolve(principal, name)
        return looked_up

    assert await seen() == ["glossary", "animals"]
    for number in range(2):
        await parts.catalog.change_settings(
            await parts.catalog.resolve(caller, "glossary"), ModelSettings(idle_timeout_s=7.0 + number)
        )
        assert await seen() == ["glossary"]
        assert (await elsewhere.resolve(caller, "glossary")).idle_timeout_s == 7.0 + number
    await parts.catalog.set_aliases(await parts.catalog.resolve(visitor, "animals"), ["pets"])
    assert await seen() == ["animals"]
    read, num_reads = parts.database.read, 0

    def counted(*given: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        return read(*given)

    with monkeypatch.context() as patched:
        patched.setattr(parts.database, "read", counted)
        assert await seen() == []
    assert num_reads == 1  # of the versions alone
    await parts.prices.add("", 7, 8, 9)
    assert await seen() == ["glossary", "animals"]
    async with parts.database.write() as connection:
        await bump_version(connection, "catalog")  # by a gateway of an earlier release, which knows no tenants here
    assert await seen() == ["glossary", "animals"]


async def test_later_price_applies_without_a_catalog_change(parts: AccountingRig, caller: Principal) -> None:
    now = 1_000
    prices = Prices(parts.database, parts.table_versions, clock=lambda: now)
    catalog = Catalog(parts.database, parts.table_versions, prices)
    await publish(parts, "glossary", version())
    later = await prices.add("", 7, 8, 9, now + 10**9)
    assert (await catalog.resolve(caller, "glossary")).price.price_id == "price-default"
    now += 10**9 + 1
    assert (await catalog.resolve(caller, "glossary")).price == later


async def test_models_with_a_minimum_are_listed(parts: AccountingRig, caller: Principal) -> None:
    await publish(parts, "glossary", version("v1"))
    model = await parts.catalog.resolve(caller, "glossary")

    async def listed() -> list[tuple[str, int, tuple[str, ...]]]:
        return [
            (each.version.version_id, each.min_instances, each.schedule) for each in await parts.catalog.with_minimum()
        ]

    entries = ("daily 08:00-18:00 UTC = 1",)
    assert await listed() == []
    await parts.catalog.change_settings(model, ModelSettings(min_instances=2))
    assert await listed() == [("v1", 2, ())]
    await publish(parts, "glossary", version("v2"))
    assert await listed() == [("v2", 2, ())]
    for settings, expected in (
        (ModelSettings(min_instances=0), []),
        (ModelSettings(schedule=list(entries)), [("v2", 0, entries)]),
        (ModelSettings(schedule=[]), []),
    ):
        await parts.catalog.change_settings(model, settings)
        assert await listed() == expected


def adapter(base: str = "v1", name: str = "a1") -> Version:
    return replace(version(name), pack_id=f"pack-{base}", base_version_id=base)


async def test_adapter_names_its_base_as_parent(parts: AccountingRig, caller: Principal) -> None:
    await publish(parts, "base", version())
    await publish(parts, "tuned", adapter())
    tuned = await parts.catalog.resolve(caller, "tuned")
    assert (tuned.parent, tuned.version.served_version_id, tuned.version.adapter_id) == ("acme/base", "v1", "a1")
    base = await parts.catalog.resolve(caller, "base")
    assert (base.parent, base.version.served_version_id, base.version.adapter_id) == ("", "v1", "")
    assert await parts.catalog.models(caller) == [base, tuned]


async def test_base_with_adapters_needs_their_engine(parts: AccountingRig, caller: Principal) -> None:
    for name in ("base", "other"):
        await publish(parts, name, version(name), ModelSettings(min_instances=1))

    async def needed() -> list[str]:
        listed = {model.name: model for model in await parts.catalog.with_minimum()}
        resolved = [await parts.catalog.resolve(caller, name) for name in ("base", "other")]
        assert [listed[model.name] for model in resolved] == resolved
        return [model.needed_engine for model in resolved]

    assert await needed() == ["", ""]
    await publish(parts, "tuned", adapter("base"))
    assert await needed() == ["torchrelay", ""]
    await publish(parts, "base", version("base"), ModelSettings(engine="vllm"))
    assert await needed() == ["vllm", ""], "its own calls follow its setting"
    await publish(parts, "base", version("base"), ModelSettings(engine="auto"))
    await parts.catalog.delete(await parts.catalog.resolve(caller, "tuned"))
    assert await needed() == ["", ""]


async def test_look_up_reads_the_description_of_no_other_model(parts: AccountingRig, caller: Principal) -> None:
    for name in ("base_1", "basex1"):  # equal for LIKE
        await publish(parts, name, version(name))
    await publish(parts, "tuned", adapter("base_1"))
    async with parts.database.write() as connection:
        broken = '{"base_version_id": "base_1", "pack_bytes": "no number"}'
        await connection.execute(update(versions).where(versions.c.version_id == "a1").values(description=broken))
    resolved = [await parts.catalog.resolve(caller, name) for name in ("base_1", "basex1")]
    assert [model.has_adapters for model in resolved] == [True, False]


async def test_base_is_neither_deleted_nor_replaced_while_adapters_need_it(
    parts: AccountingRig, caller: Principal
) -> None:
    await publish(parts, "base", version())
    await publish(parts, "tuned", adapter())
    base = await parts.catalog.resolve(caller, "base")
    with pytest.raises(Conflict, match="delete tuned first"):
        await parts.catalog.delete(base)
    with pytest.raises(Conflict, match="delete tuned first"):
        await publish(parts, "base", version("v2"))
    await publish(parts, "base", version())  # the same files again
    await publish(parts, "copy", version())  # another model of the tenant has the version, too
    await publish(parts, "base", version("v2"))
    assert (await parts.catalog.resolve(caller, "tuned")).parent == "acme/copy"
    await parts.catalog.delete(await parts.catalog.resolve(caller, "tuned"))
    await parts.catalog.delete(await parts.catalog.resolve(caller, "copy"))
    assert await retired(parts) == {"v1", "a1"}


async def test_adapter_is_not_published_without_its_base(parts: AccountingRig) -> None:
    with pytest.raises(Conflict, match="the base version"):
        await publish(parts, "tuned", adapter())
    await publish(parts, "base", version())
    with pytest.raises(Conflict, match="the base version"):
        await publish(parts, "base", adapter())


async def test_engine_of_a_base_and_its_adapters_exclude_each_other(parts: AccountingRig, caller: Principal) -> None:
    """They are checked in the transaction that changes one of them: both may be under way at once."""
    await publish(parts, "base", version())
    base = await parts.catalog.resolve(caller, "base")
    await parts.catalog.change_settings(base, ModelSettings(engine="vllm"))
    with pytest.raises(Conflict, match="changed to vllm"):
        await publish(parts, "tuned", adapter())
    await parts.catalog.change_settings(base, ModelSettings(engine="auto"))
    await publish(parts, "tuned", adapter())
    with pytest.raises(Conflict, match="delete tuned first"):
        await parts.catalog.change_settings(base, ModelSettings(engine="vllm:2"))
    await parts.catalog.change_settings(base, ModelSettings(max_instances=3))


HOUR_S = 3600


def at(text: str) -> float:
    """Unix seconds of a time with its offset."""
    return datetime.fromisoformat(text).timestamp()


def test_entries_are_parsed() -> None:
    for written, read in (
        ("mon-fri 08:00-18:00 Europe/Berlin = 2", "mon-fri 08:00-18:00 Europe/Berlin = 2"),
        ("  MON,wed,Tue  8:00 - 18:30 utc=3 ", "mon-wed 08:00-18:30 UTC = 3"),
        ("fri-mon 22:00-06:00 america/new_york = 1", "mon,fri-sun 22:00-06:00 America/New_York = 1"),
        ("daily 00:00-24:00 Asia/Kolkata = 10000", "daily 00:00-24:00 Asia/Kolkata = 10000"),
        ("mon-sun 23:00-00:00 UTC = 1", "daily 23:00-00:00 UTC = 1"),
    ):
        assert str(parse_entry(written)) == read
        assert parse_entry(read) == parse_entry(written)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("weekdays at eight", "is not of the form DAYS BEGIN-END ZONE = INSTANCES; write it as 'mon-fri 08:00-18:00"),
        ("mon-fri 08:00-18:00 = 2", "is not of the form"),
        ("mon-fry 08:00-18:00 UTC = 2", "has unknown days 'mon-fry'; write mon, tue,"),
        ("mon 08:00-18:60 UTC = 2", "has no time 18:60; write times from 00:00 to 24:00"),
        ("mon 24:00-06:00 UTC = 2", "begins at 24:00; write 00:00, and the next day"),
        ("mon 08:00-08:00 UTC = 2", "ends when it begins; for whole days write 00:00-24:00"),
        ("mon 08:00-18:00 Europe/Berlln = 2", "has an unknown time zone 'Europe/Berlln'; write an IANA name"),
        ("mon 08:00-18:00 ../../etc/passwd = 2", "has an unknown time zone"),
        ("mon 08:00-18:00 UTC = 0", "the number of instances must be from 1 to 10,000"),
    ],
)
def test_invalid_entries_are_refused_with_a_hint(written: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_entry(written)
    assert refused.value.field == "schedule" and said in refused.value.message
    assert refused.value.message.startswith(f"schedule {written!r} ")


WORKDAYS, NIGHT = "mon-fri 08:00-18:00 Europe/Berlin = 2", "fri 22:00-06:00 UTC = 1"
MONDAY = ("2026-11-30T08:00+01:00", 10.0)


@pytest.mark.parametrize(
    ("entry", "now", "windows"),
    [
        (WORKDAYS, "2026-11-27T17:59:59+01:00", [("2026-11-27T08:00+01:00", 10.0), MONDAY]),  # a Friday
        (WORKDAYS, "2026-11-27T18:00:00+01:00", [MONDAY]),
        # A window over midnight belongs to its first day.
        (NIGHT, "2026-11-28T05:00+00:00", [("2026-11-27T22:00+00:00", 8.0), ("2026-12-04T22:00+00:00", 8.0)]),
        (NIGHT, "2026-11-28T06:00+00:00", [("2026-12-04T22:00+00:00", 8.0)]),
        # Local time goes on through a change of the clock.
        (
            "daily 08:00-18:00 Europe/Berlin = 1",
            "2026-10-24T00:00+02:00",
            [("2026-10-24T08:00+02:00", 10.0), ("2026-10-25T08:00+01:00", 10.0)],
        ),
        # A change within a window prolongs or shortens it: the clock is put back; it shows the window's times twice; it
        # is put forward; there is no 02:30; the window ends in the hour that is left out.
        ("sun 01:00-05:00 Europe/Berlin = 1", "2026-10-25T00:00+02:00", [("2026-10-25T01:00+02:00", 5.0)]),
        ("sun 02:15-02:45 Europe/Berlin = 1", "2026-10-25T00:00+02:00", [("2026-10-25T02:15+02:00", 1.5)]),
        ("sun 01:00-05:00 Europe/Berlin = 1", "2026-03-29T00:00+01:00", [("2026-03-29T01:00+01:00", 3.0)]),
        ("sun 02:30-03:15 Europe/Berlin = 1", "2026-03-29T00:00+01:00", [("2026-03-29T01:30+01:00", 0.75)]),
        ("sat 22:00-02:30 Europe/Berlin = 1", "2026-03-28T12:00+01:00", [("2026-03-28T22:00+01:00", 4.5)]),
    ],
)
def test_windows_from_now_on(entry: str, now: str, windows: list[tuple[str, float]]) -> None:
    assert [
        (each.begin_unix_s, (each.end_unix_s - each.begin_unix_s) / HOUR_S)
        for each in islice(parse_entry(entry).windows(at(now)), len(windows))
    ] == [(at(begin), hours) for begin, hours in windows]


@given(
    entry=st.builds(
        ScheduleEntry,
        st.frozensets(st.integers(0, 6), min_size=1),
        st.integers(0, 1439),
        st.integers(1, 1440),
        st.sampled_from(["Europe/Berlin", "America/New_York", "UTC", "Australia/Lord_Howe", "Pacific/Apia"]),
        st.integers(1, 9),
    ).filter(lambda entry: entry.begin_minute != entry.end_minute),
    now=st.integers(0, 4 * 10**9),
)
def test_windows_are_ordered_and_entries_round_trip(entry: ScheduleEntry, now: int) -> None:
    assert parse_entry(str(entry)) == entry
    windows = list(islice(entry.windows(now), 9))
    assert all(each.end_unix_s > now and each.begin_unix_s < each.end_unix_s for each in windows)
    assert [each.begin_unix_s for each in windows] == sorted({each.begin_unix_s for each in windows})
    assert windows[0].begin_unix_s <= now + 8 * 24 * HOUR_S, "each week has one"
