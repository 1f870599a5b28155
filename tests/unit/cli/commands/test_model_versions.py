"""The versions of a model, and the return to one."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_gateway import FakeGateway
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home


def a_version(version_id: str, *, is_current: bool = False) -> dict[str, Any]:
    times = {"replaced": None, "kept_until": None} if is_current else {"replaced": 1, "kept_until": 541}
    return {"id": version_id, "architecture": "LlamaForCausalLM", "dtype": "F32", "size_bytes": 10**9, **times}


def test_versions_are_listed(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.versions = [a_version("0123456789abcdef", is_current=True), a_version("fedcba9876543210")]
    lines = run("models", "versions", "acme/tiny").stdout.splitlines()[3:5]
    assert lines[0].split() == ["0123456789ab", "LlamaForCausalLM", "F32", "1", "GB", "current"]
    assert lines[1].split()[:6] == ["fedcba987654", "LlamaForCausalLM", "F32", "1", "GB", "replaced"]
    assert gateway.asked[-1][1] == "/v1/versions?model=acme%2Ftiny"
    assert json.loads(run("models", "versions", "tiny", "--json").stdout) == {"data": gateway.versions}


def test_model_is_rolled_back(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("models", "rollback", "tiny")
    assert gateway.asked.pop() == ("POST", "/v1/models/tiny/rollback", {})
    assert shown.stdout == "acme/tiny: version fedcba987654 is current again\n"
    ids = ["0123456789abcdef", "fedcba9876543210", "fedc000000000000"]
    gateway.versions = [a_version(ids[0], is_current=True), a_version(ids[1]), a_version(ids[2])]
    run("models", "rollback", "tiny", "fedc0")
    assert gateway.asked.pop()[2] == {"version": ids[2]}
    for begin, message in (("fedc", "several versions begin"), ("0123", "no replaced version begins")):
        refused = run("models", "rollback", "tiny", begin).exception
        assert isinstance(refused, CliError) and refused.message == f"{message} with {begin!r}"
        assert refused.hint == "replaced versions that are kept: fedcba987654, fedc00000000"
