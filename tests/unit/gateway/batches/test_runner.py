"""Batches on a real token path and both databases: lines are tried until they have a result, which is billed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, insert, select

from tests.support.gateway_ports import PRINCIPAL
from tests.support.wait import eventually
from tests.unit.gateway.conftest import AccountingRig
from tests.unit.gateway.scripted_services import ScriptedStore, serving
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import PermissionDenied, RateLimited, Unauthenticated
from torchrelay.gateway.background import background
from torchrelay.gateway.batches import runner as runner_module
from torchrelay.gateway.batches.core import OPEN, Batch, Purpose
from torchrelay.gateway.batches.files import Files
from torchrelay.gateway.batches.line_call import BatchCatalog
from torchrelay.gateway.batches.runner import BatchRunner, LineLimits
from torchrelay.gateway.batches.table import Batches
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.core import Principal, ServiceClass
from torchrelay.gateway.sql.tables import balances, batch_results, gateways, opened, tenants

PATH = "/v1/completions"
BODY = {"model": "echo", "prompt": PROMPT, "max_tokens": 3}
USED_NANO = len(PROMPT) * 1 + 3 * 2  # of such a line, at the price of batches


@dataclass
class BatchRig:
    parts: AccountingRig
    tokens: TokenPathRig
    files: Files
    batches: Batches
    stack: AsyncExitStack = field(repr=False)
    key_error: Exception | None = None

    async def principal_of(self, key_id: str) -> Principal:
        if self.key_error is not None:
            raise self.key_error
        assert key_id == PRINCIPAL.key_id
        return PRINCIPAL

    def runner(self, gateway_id: str, at_once: int = 8) -> BatchRunner:
        path, catalog = self.tokens.token_path, BatchCatalog(self.tokens.ports, self.parts.prices)
        limits = LineLimits(at_once, at_once, 1 << 20)
        callers = self.principal_of
        return BatchRunner(self.batches, self.files, path.apps, path.pipeline, catalog, callers, gateway_id, limits)

    async def start(self, gateway_id: str = "gw-1") -> BatchRunner:
        """Runs batches as that gateway."""
        async with self.parts.database.write() as connection:
            await connection.execute(insert(gateways).values(gateway_id=gateway_id, beat=1))
        runner = self.runner(gateway_id)
        await self.stack.enter_async_context(background(runner.run(every_s=0.02)))
        return runner

    async def begin(self, bodies: Sequence[dict[str, Any]], **options: Any) -> Batch:
        async def content() -> AsyncIterator[bytes]:
            for number, body in enumerate(bodies):
                line = {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": body}
                yield json.dumps(line).encode() + b"\n"

        file = await self.files.receive(PRINCIPAL.tenant_id, "input", content(), 1000)
        made = Batches(self.parts.database, self.files, **options) if options else self.batches
        return await made.create(PRINCIPAL, PATH, file.file_id, {})

    async def ended(self, batch: Batch) -> Batch:
        async def has_ended() -> bool:
            return (await self.batches.find(None, batch.batch_id)).status not in OPEN

        await eventually(has_ended)
        return await self.batches.find(None, batch.batch_id)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = self.files.content(await self.files.find(None, file_id))
        return [json.loads(line) for line in b"".join([part async for part in content]).splitlines()]

    async def spent(self) -> int:
        """What the tenant pays. The books are in order."""
        await eventually(self.is_settled)
        assert (await reconcile(self.parts.database)).faults == ()
        async with self.parts.database.read() as connection:
            of_tenant = balances.c.tenant_id == PRINCIPAL.tenant_id
            spent: int = (await connection.execute(select(balances.c.spent_nano).where(of_tenant))).scalar_one()
        return spent

    async def is_owned_by(self, batch: Batch, gateway_id: str) -> bool:
        return (await self.batches.find(None, batch.batch_id)).gateway_id == gateway_id

    async def unsettled(self) -> list[str]:
        query = select(opened.c.request_id).where(opened.c.settled_unix_us.is_(None))
        async with self.parts.database.read() as connection:
            return list((await connection.execute(query)).scalars())

    async def is_settled(self) -> bool:
        return not await self.unsettled()


@pytest.fixture
async def rig(parts: AccountingRig, make_rig: MakeRig) -> AsyncIterator[BatchRig]:
    tenant = {"tenant_id": PRINCIPAL.tenant_id, "name": "other", "created_unix_us": 1}
    async with parts.database.write() as connection:
        await connection.execute(insert(tenants).values(tenant))
        await connection.execute(insert(balances).values(tenant_id=PRINCIPAL.tenant_id, spent_nano=0))
    await parts.prices.add("", 1, 1, 2, service="batch")
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(serving(ScriptedStore()))  # type: ignore[abstract]
        files = Files(parts.database, StoreClient(channel, "store:1"))
        tokens = await make_rig(ledger=parts.ledger)
        yield BatchRig(parts, tokens, files, Batches(parts.database, files), stack)


async def test_lines_are_answered_in_order_and_pay_the_price_of_batches(rig: BatchRig) -> None:
    several = BODY | {"prompt": [PROMPT, PROMPT[:3]]}
    urgent = BODY | {"service_tier": "priority"}
    bodies = [BODY, BODY | {"model": "none"}, several, BODY | {"stream": True}, urgent]
    rig.tokens.ports.refusal = RateLimited("too many", retry_after_s=0.0)
    rig.tokens.ports.num_until_refusal = 2
    await rig.start()
    batch = await rig.begin(bodies)
    await eventually(lambda: len(rig.tokens.ports.admitted) == 2)
    rig.tokens.ports.refusal = None
    batch = await rig.ended(batch)
    assert (batch.status, batch.num_lines, batch.num_completed, batch.num_failed) == ("completed", 5, 3, 2)
    output, errors = await rig.lines(batch.output_file_id), await rig.lines(batch.error_file_id)
    assert [line["custom_id"] for line in output] == ["line-0", "line-2", "line-4"]
    assert [line["response"]["status_code"] for line in errors] == [404, 400]
    assert all(line["response"]["request_id"] == line["response"]["body"]["id"] for line in output)
    usages = [line["response"]["body"]["usage"] for line in output]
    assert await rig.spent() == sum(use["prompt_tokens"] + 2 * use["completion_tokens"] for use in usages)
    assert {int(admit.service_class) for admit in rig.tokens.scheduler.admits} == {ServiceClass.BATCH}
    await rig.batches.clear_ended()
    async with rig.parts.database.read() as connection:
        assert (await connection.execute(select(batch_results))).all() == []
    assert not rig.tokens.ports.reserved


async def test_lines_that_have_not_ended_with_the_window_are_expired_and_free(rig: BatchRig) -> None:
    for worker in rig.tokens.workers:
        worker.pause_at = 2
    await rig.start()
    batch = await rig.ended(await rig.begin([BODY] * 3, window_s=1.0))
    assert (batch.status, batch.output_file_id) == ("expired", None)
    errors = await rig.lines(batch.error_file_id)
    assert [line["error"]["code"] for line in errors] == ["batch_expired"] * 3
    assert await rig.spent() == 0 and not rig.tokens.ports.reserved


async def test_lines_of_a_revoked_key_end_with_errors(rig: BatchRig) -> None:
    rig.key_error = Unauthenticated("revoked")
    await rig.start()
    batch = await rig.ended(await rig.begin([BODY] * 3))
    assert (batch.status, batch.num_failed) == ("completed", 3)
    assert {line["response"]["status_code"] for line in await rig.lines(batch.error_file_id)} == {401}
    later = await rig.begin([BODY])
    for after, shown, has_more in ((None, later, True), (later.batch_id, batch, False)):
        [listed], *more = await rig.batches.page(None, 1, after)
        assert (listed.batch_id, more) == (shown.batch_id, [has_more])
    kept, has_more = await rig.files.page(None, Purpose.BATCH, 1, later.input_file_id, newest_first=True)
    assert ([file.file_id for file in kept], has_more) == ([batch.input_file_id], False)
    await rig.ended(later)


@dataclass(eq=False)
class UnderWay:
    """A request under way, as far as batches look at it."""

    resolved: Any


async def test_lines_give_way_to_other_requests_of_their_model(rig: BatchRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single line runs beside them, and all when they have ended."""
    monkeypatch.setattr(runner_module, "_WAY_S", 0.1)
    for worker in rig.tokens.workers:
        worker.pause_at = 2
    running = rig.tokens.token_path.pipeline.requests
    model = await rig.tokens.ports.resolve(PRINCIPAL, "echo")
    other: Any = UnderWay(SimpleNamespace(service_class=ServiceClass.STANDARD, model=model))
    running.add(other)
    await rig.start()
    batch = await rig.begin([BODY] * 4)
    await eventually(lambda: len(running) == 2)
    for _ in range(10):
        await asyncio.sleep(runner_module._LOOK_S)
        assert len(running) == 2
    running.remove(other)
    await eventually(lambda: len(running) == 4)
    await rig.batches.cancel(PRINCIPAL.tenant_id, batch.batch_id)
    await rig.ended(batch)


async def test_gateway_that_was_taken_for_gone_delivers_late_and_loses(rig: BatchRig) -> None:
    for worker in rig.tokens.workers:
        worker.pause_at = 2
    await rig.start("gw-stalled")
    batch = await rig.begin([BODY] * 4)
    await eventually(lambda: sum(num == 2 for num in rig.tokens.num_accepted()) == 4)

    async def all_opened() -> bool:
        return len(await rig.unsettled()) == 4

    await eventually(all_opened)
    late = await rig.unsettled()
    for request_id in late:  # as the sweep does
        await rig.parts.ledger.settle(request_id, [])
    async with rig.parts.database.write() as connection:
        await connection.execute(delete(gateways))
    await rig.start("gw-next")
    await eventually(lambda: rig.is_owned_by(batch, "gw-next"))
    for worker in rig.tokens.workers:
        worker.pause_at = None
    rig.tokens.model.wake()
    batch = await rig.ended(batch)
    output = await rig.lines(batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(4)]
    assert not {line["response"]["request_id"] for line in output} & set(late)
    assert await rig.spent() == 4 * USED_NANO


async def test_stopped_gateway_leaves_its_lines_to_another(rig: BatchRig) -> None:
    rig.tokens.workers[0].pause_at = rig.tokens.workers[1].pause_at = 2
    runner = await rig.start("gw-leaves")
    batch = await rig.begin([BODY] * 4)
    await eventually(lambda: sum(num == 2 for num in rig.tokens.num_accepted()) == 4)
    runner.stop()
    await eventually(lambda: not rig.tokens.token_path.pipeline.requests)
    assert await rig.spent() == 0
    async with rig.parts.database.write() as connection:
        await connection.execute(delete(gateways))
    rig.tokens.workers[0].pause_at = rig.tokens.workers[1].pause_at = None
    await rig.start("gw-next")
    batch = await rig.ended(batch)
    assert (batch.status, batch.num_completed) == ("completed", 4)
    assert await rig.spent() == 4 * USED_NANO


async def test_batch_of_a_deleted_tenant_ends_without_files(rig: BatchRig) -> None:
    rig.tokens.workers[0].pause_at = rig.tokens.workers[1].pause_at = 2
    await rig.start()
    batch = await rig.begin([BODY] * 3)
    await eventually(lambda: sum(num == 2 for num in rig.tokens.num_accepted()) == 3)
    await rig.batches.cancel_all(PRINCIPAL.tenant_id)
    await rig.files.drop_all(PRINCIPAL.tenant_id)
    batch = await rig.ended(batch)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("cancelled", None, None)
    assert await rig.spent() == 0


async def test_lines_have_the_key_that_created_their_batch(parts: AccountingRig) -> None:
    caller_of = parts.keys.caller_of
    info, token = await parts.keys.create(parts.acme.tenant_id)
    assert await caller_of(info.key_id) == await parts.keys.authenticate(f"Bearer {token}")
    await parts.keys.change(info.key_id, None, {"paused_unix_us": 1})
    with pytest.raises(PermissionDenied):
        await caller_of(info.key_id)
    await parts.keys.change(info.key_id, None, {"paused_unix_us": None})
    await parts.keys.revoke(info.key_id, None)
    with pytest.raises(Unauthenticated):
        await caller_of(info.key_id)
