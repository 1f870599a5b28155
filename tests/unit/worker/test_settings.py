"""The settings of a worker: its roles, its key and its id."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from torchrelay.control.v1 import types_pb2
from torchrelay.worker.settings import WorkerSettings

KEY = "ab" * 32


def test_roles_keep_their_order_without_duplicates() -> None:
    settings = WorkerSettings(node_key=KEY, worker_id="w", roles="decode, prefill,decode")
    assert settings.role_names == ["decode", "prefill"]
    assert settings.role_numbers == [types_pb2.ROLE_DECODE, types_pb2.ROLE_PREFILL]


@pytest.mark.parametrize("roles", ["", " , ", "prefill,encode"])
def test_unknown_or_missing_roles_are_refused(roles: str) -> None:
    with pytest.raises(ValidationError, match="prefill, decode"):
        WorkerSettings(node_key=KEY, worker_id="w", roles=roles)


@pytest.mark.parametrize(
    "wrong", [{"node_key": "abc"}, {"node_key": KEY, "worker_id": "a.b"}, {"worker_id": "w"}, {"node_key": KEY}]
)
def test_worker_requires_key_and_valid_id(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"node_key|worker_id"):
        WorkerSettings(**wrong)  # type: ignore[arg-type]
