"""Allowed calls, by a token for one node or by a certificate."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

import torchrelay.control.v1
from torchrelay.common.errors import CallerRefused, CallerUnknown
from torchrelay.common.identity.callers import (
    ANYONE,
    CLUSTER_NAME,
    CallCheck,
    Caller,
    MethodCallers,
    call_token,
    certificate_name,
)
from torchrelay.control.v1 import (
    decode_pb2,
    external_scaler_pb2,
    param_store_pb2,
    prefill_pb2,
    scheduler_pb2,
    worker_pb2,
)
from torchrelay.decode.role import CALLERS as DECODE
from torchrelay.param_store.grpc.servicer import CALLERS as STORE
from torchrelay.prefill.role import CALLERS as PREFILL
from torchrelay.scheduler.service.external_scaler import CALLERS as EXTERNAL_SCALER
from torchrelay.scheduler.service.servicer import CALLERS as SCHEDULER
from torchrelay.worker.servicer import CALLERS as WORKER

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
LOAD = "/torchrelay.control.v1.Worker/Load"
CONTRACT: dict[FileDescriptor, MethodCallers] = {
    decode_pb2.DESCRIPTOR: DECODE,
    external_scaler_pb2.DESCRIPTOR: EXTERNAL_SCALER,
    param_store_pb2.DESCRIPTOR: STORE,
    prefill_pb2.DESCRIPTOR: PREFILL,
    scheduler_pb2.DESCRIPTOR: SCHEDULER,
    worker_pb2.DESCRIPTOR: WORKER,
}


def checked(*, is_tls: bool = False) -> CallCheck:
    made = CallCheck(KEY, is_tls=is_tls)
    made.allow({LOAD: {Caller.SCHEDULER}})
    return made


def test_every_rpc_has_allowed_callers() -> None:
    """A new method that nobody declared would be refused to all; one without a need for callers has none."""
    for file, callers in CONTRACT.items():
        methods = {
            f"/{service.full_name}/{method.name}"
            for service in file.services_by_name.values()
            for method in service.methods
        }
        assert set(callers) == methods
        assert all(callers.values())


def test_all_services_of_contract_are_covered() -> None:
    folder = Path(torchrelay.control.v1.__path__[0])
    files = [import_module(f"torchrelay.control.v1.{path.stem}_pb2").DESCRIPTOR for path in folder.glob("*.proto")]
    assert {file.name for file in files if file.services_by_name} == {file.name for file in CONTRACT}


@pytest.mark.parametrize("caller", Caller)
def test_token_proves_single_caller(caller: Caller) -> None:
    if caller is Caller.SCHEDULER:
        checked().check(LOAD, call_token(KEY, caller), ())
    else:
        with pytest.raises(CallerRefused, match=f"{caller} may not call {LOAD}; allowed: scheduler"):
            checked().check(LOAD, call_token(KEY, caller), ())


@pytest.mark.parametrize(
    "token",
    [
        "",
        "x",
        ",",
        "ä",
        call_token(OTHER_KEY, Caller.SCHEDULER),
        call_token(KEY, Caller.SCHEDULER)[:-1],
        KEY.hex(),
        "," * 99,
    ],
)
def test_token_of_other_node_is_refused(token: str) -> None:
    with pytest.raises(CallerUnknown):
        checked().check(LOAD, token, [certificate_name(Caller.SCHEDULER)])  # which nobody has proven


def test_undeclared_method_is_refused() -> None:
    with pytest.raises(CallerRefused, match="allowed: nobody"):
        checked().check("/torchrelay.control.v1.Worker/Explode", call_token(KEY, *Caller), ())


@pytest.mark.parametrize(
    ("names", "passes"),
    [
        ([CLUSTER_NAME, "scheduler.torchrelay.internal"], True),
        ([CLUSTER_NAME, "worker.torchrelay.internal", "scheduler.torchrelay.internal"], True),
        ([CLUSTER_NAME], False),
        ([CLUSTER_NAME, "worker.torchrelay.internal"], False),
        ([CLUSTER_NAME, "scheduler.worker.torchrelay.internal"], False),  # a worker by the name of scheduler
        (["scheduler"], False),
        ([], False),
    ],
)
def test_certificate_proves_named_roles(names: list[str], passes: bool) -> None:
    if passes:
        checked(is_tls=True).check(LOAD, "", names)
    else:
        with pytest.raises(CallerRefused):
            checked(is_tls=True).check(LOAD, call_token(KEY, Caller.SCHEDULER), names)  # a token is nothing with TLS


@pytest.mark.parametrize("is_tls", [False, True])
def test_method_for_anyone_needs_no_token(is_tls: bool) -> None:
    check = checked(is_tls=is_tls)
    check.allow({LOAD: ANYONE})
    check.check(LOAD, "", ())
