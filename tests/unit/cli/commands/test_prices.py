"""Prices in dollars per million tokens, and which applies to a model."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_gateway import PRICE, FakeGateway
from torchrelay.cli.commands.prices import current_price
from torchrelay.cli.home import Home

OWN = PRICE | {"model": "acme/tiny", "prompt_nano": 1, "valid_from": "2026-01-01T00:00:00+00:00"}
ENDED = PRICE | {"prompt_nano": 7_500, "valid_to": "2026-01-01T00:00:00+00:00"}


def test_prices_are_listed(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.prices = [ENDED, PRICE, OWN]
    lines = run("prices").stdout.splitlines()
    assert [line.split() for line in lines[3:5]] == [
        ["(default)", "$0.100", "$0.025", "$0.400"],
        ["acme/tiny", "$0.001", "$0.025", "$0.400", "2026-01-01", "00:00"],
    ]
    assert "$7.500" not in run("prices").stdout and "$7.500" in run("prices", "--all").stdout
    assert json.loads(run("prices", "--json").stdout)["data"][1] == PRICE


def test_price_is_set_with_the_admin_key(run: Run, home: Home, gateway: FakeGateway) -> None:
    shown = run("prices", "set", "acme/tiny", "--prompt", "0.2", "--output", "1", "--from", "2027-01-01")
    nano = {"prompt_nano": 200, "cached_nano": 200, "output_nano": 1000}
    assert gateway.asked.pop() == ("PUT", "/v1/prices", nano | {"model": "acme/tiny", "valid_from": "2027-01-01"})
    assert "acme/tiny: prompt $0.200, cached $0.200, output $1.000 from 2027-01-01 UTC" in shown.stdout
    run("prices", "set", "--prompt", "0.2", "--cached", "0", "--output", "1")
    assert gateway.asked.pop()[2] == nano | {"cached_nano": 0}


@pytest.mark.parametrize("wrong", ["-1", "0.0001", "nan", "inf", "much"])
def test_impossible_price_is_refused(run: Run, home: Home, wrong: str) -> None:
    assert run("prices", "set", "--prompt", wrong, "--output", "1").exit_code == 2


def test_own_price_applies_before_the_default() -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    later = OWN | {"valid_from": "2027-01-01T00:00:00+00:00"}
    assert current_price([ENDED, PRICE, OWN], "acme/tiny", now) == OWN
    assert (
        current_price([ENDED, PRICE, OWN], "acme/other", now)
        == PRICE
        == current_price([PRICE, later], "acme/tiny", now)
    )


def test_model_is_shown_with_settings_and_price(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.published, gateway.prices = {"tiny"}, [PRICE, OWN]
    shown = run("models", "show", "acme/tiny").stdout
    for words in ("0123456789ab", "1.5 MB", "512 tokens", "60 s (default)", "2 per role", "prompt $0.001", "to zero"):
        assert words in shown
    assert json.loads(run("models", "show", "tiny", "--json").stdout)["price"] == OWN
    settings = run("models", "settings", "tiny")
    assert "schedule" in settings.stdout and "version" not in settings.stdout
    assert "torchrelay models set tiny" in settings.stderr
    assert json.loads(run("models", "settings", "tiny", "--json").stdout)["max_instances"] == 2
