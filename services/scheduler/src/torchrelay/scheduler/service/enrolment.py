"""Enrolment of stores and workers: a join token is exchanged for the credentials of one node."""

from __future__ import annotations

import re

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.join_token import check_join_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.process.settings import NODE_ID
from torchrelay.control.v1 import scheduler_pb2


def enroll(cluster_key: bytes, request: scheduler_pb2.EnrollRequest, unix_s: float) -> scheduler_pb2.EnrollReply:
    """Derives the credentials of nodes from the cluster key, for a caller whose join token allows these nodes.

    Raises as ``check_join_token``, and ``InvalidRequest`` for an id that no node can have.
    """
    is_worker = bool(request.worker_id)
    for field in ("store_id", "worker_id") if is_worker else ("store_id",):
        node_id = getattr(request, field)
        check_join_token(cluster_key, request.join_token, node_id, unix_s)
        if re.fullmatch(NODE_ID, node_id) is None:
            raise InvalidRequest(f"{node_id!r} is not 1 to 63 letters, digits, hyphens and underscores", field=field)
    store_key = derive_node_key(cluster_key, request.store_id)
    if not is_worker:
        return scheduler_pb2.EnrollReply(node_key=store_key.hex())
    node_key = derive_node_key(cluster_key, request.worker_id).hex()
    return scheduler_pb2.EnrollReply(node_key=node_key, store_token=call_token(store_key, Caller.WORKER))
