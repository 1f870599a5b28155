"""Making keys, and which of them counts."""

from __future__ import annotations

import pytest

from tests.unit.cli.conftest import Run, refusal
from tests.unit.cli.fake_gateway import ADMIN_KEY, TENANT_KEY, FakeGateway
from torchrelay.cli.commands.key import id_of
from torchrelay.cli.home import Home


def test_first_key_creates_tenant_and_is_saved(run: Run, home: Home, gateway: FakeGateway) -> None:
    made = run("key", "create", "--tenant", "acme", "--name", "laptop")
    assert made.exit_code == 0, made.exception
    assert made.stdout == TENANT_KEY + "\n"
    assert "created tenant acme" in made.stderr
    assert home.saved_key() == TENANT_KEY
    again = run("key", "create", "--tenant", "acme", "--no-save")
    assert "created tenant" not in again.stderr
    replaced = run("key", "create", "--tenant", "acme")
    assert "saved as this home's key; the previous one stays valid" in replaced.stderr
    revoked = run("key", "revoke", TENANT_KEY)
    assert gateway.asked[-1][:2] == ("DELETE", "/v1/keys/8x2kq0v3m1c9d7fz")
    assert revoked.exit_code == 0
    assert home.saved_key() is None


def test_key_of_other_tenant_prints_new_tenant(run: Run, home: Home, gateway: FakeGateway) -> None:
    run("key", "create", "--tenant", "acme")
    gateway.next_key = "tr-0123456789abcdef-secret"
    said = run("key", "create", "--tenant", "birch").stderr
    assert "saved as this home's key: commands now act as tenant birch (before: acme)" in said
    assert "back: torchrelay key use acme" in said
    home.save_key("tr-gone-secret")
    said = run("key", "create", "--tenant", "birch").stderr
    assert "saved as this home's key: commands now act as tenant birch\n" in said


def test_unprintable_key_is_not_created(run: Run, home: Home, gateway: FakeGateway) -> None:
    run("key", "create", "--tenant", "acme")
    gateway.asked.clear()
    gateway.lists_keys = False
    refused = run("key", "create", "--tenant", "birch")
    assert str(refused.exception) == "the database cannot be reached"
    assert [method for method, _, _ in gateway.asked] == ["GET"]
    assert home.saved_key() == TENANT_KEY


def test_environment_key_overrides_saved_key(home: Home, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_API_KEY", "of-an-earlier-home")
    said = run("key", "create", "--tenant", "acme").stderr
    assert "unset TORCHRELAY_API_KEY; commands then act as tenant acme" in " ".join(said.split())


def test_key_has_service_class(run: Run, home: Home, gateway: FakeGateway) -> None:
    assert run("key", "create", "--tenant", "acme", "--service-class", "batch").exit_code == 0
    assert gateway.asked[-1] == ("POST", "/v1/keys", {"tenant": "acme", "service_class": "batch"})
    assert run("key", "create", "--tenant", "acme", "--service-class", "flex").exit_code == 2


def test_kept_keys_are_used_by_tenant(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.published = {"tiny"}
    assert "no keys are kept" in run("key", "use").stderr
    run("key", "create", "--tenant", "acme")
    gateway.next_key = "tr-0123456789abcdef-secret"
    run("key", "create", "--tenant", "birch")
    assert run("key", "use").stdout == "acme\nbirch (in use)\n"
    gateway.keys = {TENANT_KEY}
    assert run("models", "set", "acme/tiny", "--max-instances", "1").exit_code == 0  # by the key of the model's tenant
    unknown = refusal(run("models", "set", "acme/other", "--max-instances", "1"))
    assert unknown.hint.startswith("this key is of tenant acme; ")
    refusal(run("models"))
    assert "act as tenant acme" in run("key", "use", "acme").stderr
    assert run("models").exit_code == 0 and home.saved_key() == TENANT_KEY
    refused = refusal(run("key", "use", "cedar"))
    assert "kept: acme, birch" in refused.hint


def test_key_id_is_extracted() -> None:
    assert [id_of(key) for key in ("tr-abc-secret", "abc", ADMIN_KEY)] == ["abc", "abc", ADMIN_KEY]
