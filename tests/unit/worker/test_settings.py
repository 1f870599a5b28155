"""Roles of a worker: known ones, in the order they are named."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from torchrelay.control.v1 import types_pb2
from torchrelay.worker.settings import WorkerSettings

KEY = "ab" * 32


def test_the_first_role_is_the_one_the_worker_is_meant_for() -> None:
    settings = WorkerSettings(node_key=KEY, worker_id="w", roles="decode, prefill,decode")
    assert settings.role_names == ["decode", "prefill"]
    assert settings.role_numbers == [types_pb2.ROLE_DECODE, types_pb2.ROLE_PREFILL]


@pytest.mark.parametrize("roles", ["", " , ", "prefill,encode"])
def test_unknown_or_missing_roles_are_refused_with_the_known_ones(roles: str) -> None:
    with pytest.raises(ValidationError, match="prefill, decode"):
        WorkerSettings(node_key=KEY, worker_id="w", roles=roles)


@pytest.mark.parametrize(
    "wrong", [{"node_key": "abc"}, {"node_key": KEY, "worker_id": "a.b"}, {"worker_id": "w"}, {"node_key": KEY}]
)
def test_a_worker_needs_its_key_and_a_name_that_fits_a_subject(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"node_key|worker_id"):
        WorkerSettings(**wrong)  # type: ignore[arg-type]
