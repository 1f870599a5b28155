"""Users of the NATS server, one per process, and the subjects that each may use.

A worker or a store can publish only its own reports, so none can report for another. The users are written as the
``authorization`` block of a configuration of nats-server, 2.9 and later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchrelay.common.net.nats_client import Subjects, inbox_prefix

SCHEDULER_USER = "scheduler"
GATEWAY_USER = "gateway"
NODES_USER = "nodes"
_API = "$JS.API"


@dataclass(frozen=True, slots=True)
class NatsUser:
    """A user and its subjects. ``subscribe``: beside its inbox, which receives the answers to its own requests."""

    name: str
    publish: Sequence[str]
    subscribe: Sequence[str] = ()


def worker_user(worker_id: str, subjects: Subjects) -> NatsUser:
    return NatsUser(worker_id, (subjects.worker_load(worker_id), subjects.usage("*")))


def store_user(store_id: str, subjects: Subjects) -> NatsUser:
    return NatsUser(store_id, (subjects.store_load(store_id),))


def nodes_user(subjects: Subjects) -> NatsUser:
    """All stores and workers that join later; the signatures of their reports keep them apart."""
    return NatsUser(NODES_USER, (subjects.worker_load(), subjects.store_load(), subjects.usage("*")))


def scheduler_user(subjects: Subjects) -> NatsUser:
    """Reads reports; writes events, and reads them back for `torchrelay events`; holds the lease."""
    lease = (
        subjects.lease,
        f"{_API}.STREAM.CREATE.{subjects.lease_stream}",
        f"{_API}.STREAM.UPDATE.{subjects.lease_stream}",
        f"{_API}.STREAM.MSG.GET.{subjects.lease_stream}",
    )
    publish = (subjects.event(">"), *_keeps_streams(subjects), *_reads(subjects.history_stream), *lease)
    return NatsUser(SCHEDULER_USER, publish, (subjects.worker_load(), subjects.store_load()))


def gateway_user(subjects: Subjects) -> NatsUser:
    """Hints among gateways, events of models; reads the registers of gateways that are gone."""
    publish = (
        subjects.key_hint,
        subjects.event("model.*"),
        subjects.event("budget.*"),
        *_keeps_streams(subjects),
        *_reads(subjects.usage_stream),
    )
    return NatsUser(GATEWAY_USER, publish, (subjects.key_hint,))


def _keeps_streams(subjects: Subjects) -> tuple[str, ...]:
    """Creates and updates both streams; see ``ensure_streams``."""
    streams = (subjects.history_stream, subjects.usage_stream)
    return tuple(f"{_API}.STREAM.{verb}.{stream}" for stream in streams for verb in ("CREATE", "UPDATE"))


def _reads(stream: str) -> tuple[str, ...]:
    """Reads one stream by consumers of its own; pulled messages need no acknowledgement."""
    return (
        f"{_API}.STREAM.INFO.{stream}",
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.INFO.{stream}.*",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
    )


def authorization(users: Iterable[tuple[NatsUser, str]]) -> str:
    """The configuration's block for users and their passwords, as ``user_entry`` takes them."""
    return "\n".join(["authorization {", "  users: [", *(user_entry(*each) for each in users), "  ]", "}", ""])


def user_entry(user: NatsUser, password: str) -> str:
    """An entry of ``users``; the password may be a ``$VARIABLE`` of the server."""
    secret = password if password.startswith("$") else json.dumps(password)
    subscribe = json.dumps([*user.subscribe, f"{inbox_prefix(user.name)}.>"])
    lines = [
        f"    {{ user: {json.dumps(user.name)}, password: {secret}, permissions: {{",
        f"      publish: {json.dumps(list(user.publish))}",
        f"      subscribe: {subscribe}",
        "    } }",
    ]
    return "\n".join(lines)
