"""Each process may use the subjects of its role on the broker, and no others; an unknown user none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig

from tests.support.brokers import nats_server
from tests.support.nats_wire import publication, refusal, subscription
from torchrelay.common.net.nats_client import Subjects, connect, ensure_streams
from torchrelay.common.net.nats_permissions import (
    NatsUser,
    authorization,
    gateway_user,
    scheduler_user,
    store_user,
    worker_user,
)
from torchrelay.common.net.urls import with_credentials

SUBJECTS = Subjects("t")
USERS = [
    scheduler_user(SUBJECTS),
    gateway_user(SUBJECTS),
    store_user("store-1", SUBJECTS),
    worker_user("w-1", SUBJECTS),
    worker_user("w-2", SUBJECTS),
]


def password(user: str) -> str:
    return f"p-{user}"


@pytest.fixture(scope="module")
def guarded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    users: list[tuple[NatsUser, str]] = [(user, password(user.name)) for user in USERS]
    with nats_server(tmp_path_factory.mktemp("nats"), authorization=authorization(users)) as url:
        yield url


@asynccontextmanager
async def connected(url: str, user: str) -> AsyncIterator[Client]:
    client = await connect(with_credentials(url, user, password(user)), user)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("w-1", SUBJECTS.worker_load("w-1")),
        ("w-1", SUBJECTS.usage("gw-1")),
        ("store-1", SUBJECTS.store_load("store-1")),
        ("gateway", SUBJECTS.key_hint),
        ("gateway", SUBJECTS.event("model.published")),
        ("scheduler", SUBJECTS.event("instance.ready")),
    ],
)
async def test_role_publishes_its_subjects(guarded_url: str, user: str, subject: str) -> None:
    assert await refusal(guarded_url, publication(subject), user, password(user)) == ""


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("w-1", SUBJECTS.worker_load("w-2")),
        ("w-1", SUBJECTS.store_load("store-1")),
        ("w-1", SUBJECTS.key_hint),
        ("w-1", SUBJECTS.event("instance.ready")),
        ("w-1", "$JS.API.STREAM.DELETE.t_RELAY_USAGE"),
        ("w-1", "_INBOX.scheduler.answer"),
        ("store-1", SUBJECTS.store_load("store-2")),
        ("store-1", SUBJECTS.worker_load("store-1")),
        ("store-1", SUBJECTS.usage("gw-1")),
        ("gateway", SUBJECTS.worker_load("w-1")),
        ("gateway", SUBJECTS.usage("gw-1")),
        ("gateway", SUBJECTS.event("instance.ready")),
        ("gateway", "$JS.API.STREAM.PURGE.t_RELAY_USAGE"),
        ("scheduler", SUBJECTS.worker_load("w-1")),
        ("scheduler", SUBJECTS.usage("gw-1")),
        ("scheduler", "$JS.API.STREAM.DELETE.t_RELAY_HISTORY"),
        ("scheduler", "$JS.API.STREAM.CREATE.OTHER"),
        ("scheduler", Subjects("other").event("instance.ready")),
    ],
)
async def test_role_cannot_publish_elsewhere(guarded_url: str, user: str, subject: str) -> None:
    said = await refusal(guarded_url, publication(subject), user, password(user))
    assert "Permissions Violation for Publish" in said


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("w-1", SUBJECTS.worker_load()),
        ("w-1", SUBJECTS.key_hint),
        ("w-1", ">"),
        ("store-1", SUBJECTS.usage("*")),
        ("gateway", SUBJECTS.worker_load()),
        ("gateway", "_INBOX.scheduler.>"),
        ("scheduler", SUBJECTS.key_hint),
        ("scheduler", "_INBOX.>"),
    ],
)
async def test_role_cannot_subscribe_elsewhere(guarded_url: str, user: str, subject: str) -> None:
    said = await refusal(guarded_url, subscription(subject), user, password(user))
    assert "Permissions Violation for Subscription" in said


@pytest.mark.parametrize(("user", "secret"), [(None, None), ("scheduler", "p-gateway"), ("root", "p-root")])
async def test_client_without_certificate_is_refused(guarded_url: str, user: str | None, secret: str | None) -> None:
    said = await refusal(guarded_url, publication(SUBJECTS.worker_load("w-1")), user, secret)
    assert "Authorization Violation" in said


async def test_scheduler_reads_reports_and_its_events(guarded_url: str) -> None:
    async with connected(guarded_url, "scheduler") as scheduler, connected(guarded_url, "w-1") as worker:
        reports = await scheduler.subscribe(SUBJECTS.worker_load())
        await scheduler.flush()
        await worker.publish(SUBJECTS.worker_load("w-1"), b"report")
        assert (await reports.next_msg(timeout=10)).subject == SUBJECTS.worker_load("w-1")
        js = scheduler.jetstream()
        await ensure_streams(js, SUBJECTS, 1)
        await ensure_streams(js, SUBJECTS, 1)
        sequence = (await js.publish(SUBJECTS.event("scale.up"), b"{}")).seq
        assert (await js.stream_info(SUBJECTS.history_stream)).state.last_seq >= sequence
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        reader = await js.pull_subscribe(SUBJECTS.event(">"), stream=SUBJECTS.history_stream, config=config)
        assert (await reader.consumer_info()).num_pending
        assert await reader.fetch(1, timeout=10)


async def test_gateway_reads_workers_registers(guarded_url: str) -> None:
    async with connected(guarded_url, "gateway") as gateway, connected(guarded_url, "w-2") as worker:
        js = gateway.jetstream()
        await ensure_streams(js, SUBJECTS, 1)
        await worker.publish(SUBJECTS.usage("gw-1"), b"register")
        await worker.flush()
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=30)
        reader = await js.pull_subscribe(SUBJECTS.usage("gw-1"), stream=SUBJECTS.usage_stream, config=config)
        assert [message.data for message in await reader.fetch(1, timeout=10)] == [b"register"]
        await js.publish(SUBJECTS.event("model.published"), b"{}")
