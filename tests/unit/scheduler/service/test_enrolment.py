"""Credentials for stores and workers that show a join token."""

from __future__ import annotations

import pytest

from torchrelay.common.errors import CallerRefused, InvalidRequest
from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.join_token import join_token
from torchrelay.common.identity.keys import derive_compiled_key, derive_node_key
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.scheduler.service.servicer import enroll

KEY = b"k" * 32
TOKEN = join_token(KEY, "node-", 1_000)


def enrolled(store_id: str, worker_id: str = "", token: str = TOKEN) -> scheduler_pb2.EnrollReply:
    request = scheduler_pb2.EnrollRequest(join_token=token, store_id=store_id, worker_id=worker_id)
    return enroll(KEY, request, unix_s=0.0)


def test_store_gets_its_own_key() -> None:
    assert enrolled("node-a") == scheduler_pb2.EnrollReply(node_key=derive_node_key(KEY, "node-a").hex())


def test_worker_gets_its_own_key_and_token_for_store_of_its_host() -> None:
    reply = enrolled("node-a", "node-a-0")
    assert reply.node_key == derive_node_key(KEY, "node-a-0").hex()
    assert reply.store_token == call_token(derive_node_key(KEY, "node-a"), Caller.WORKER)
    assert reply.compiled_key == derive_compiled_key(KEY, "node-").hex() != derive_compiled_key(KEY).hex()


@pytest.mark.parametrize(("store_id", "worker_id"), [("store-local", ""), ("store-local", "node-a"), ("node-a", "w")])
def test_nodes_beyond_scope_of_token_are_refused(store_id: str, worker_id: str) -> None:
    with pytest.raises(CallerRefused, match="begin with 'node-'"):
        enrolled(store_id, worker_id)


@pytest.mark.parametrize(("store_id", "field"), [("", "store_id"), ("node-a\n", "store_id"), ("node-@", "store_id")])
def test_ids_that_no_node_can_have_are_refused(store_id: str, field: str) -> None:
    with pytest.raises(InvalidRequest, match="letters") as refused:
        enrolled(store_id, token=join_token(KEY, "", 1_000))
    assert refused.value.field == field
