"""`torchrelay bench`, as a person runs it, against a gateway of these tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run, refusal
from tests.unit.cli.fake_gateway import MODEL, TENANT_KEY, FakeGateway
from torchrelay.cli.bench.devices import DeviceWatch
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home

SHORT = ("--prompt", "8", "--answer", "4", "--key", TENANT_KEY)


@pytest.fixture(autouse=True)
def model(gateway: FakeGateway, home: Home) -> str:
    gateway.published.add("tiny")
    return "tiny"


@pytest.mark.parametrize(
    ("options", "number"),
    [
        (("--scenario", "single", "--requests", "3"), 3),
        (("--scenario", "multi", "--requests", "5", "--at-once", "2"), 5),
        (("--scenario", "offline", "--requests", "4"), 4),
        (("--scenario", "server", "--requests", "4", "--rate", "200"), 4),
        (("--scenario", "burst", "--duration", "0.5", "--every", "0.2", "--at-once", "2"), 4),
        (("--scenario", "cold", "--requests", "2", "--wait", "0"), 2),
    ],
)
def test_each_scenario_sends_its_requests(
    run: Run, gateway: FakeGateway, tmp_path: Path, options: tuple[str, ...], number: int
) -> None:
    file = tmp_path / "result.json"
    result = run("bench", "tiny", *options, *SHORT, "--json", "--output", str(file))
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures == json.loads(file.read_text())
    assert (figures["num_completed"], figures["num_failed"], figures["is_complete"]) == (number, 0, True)
    assert (figures["num_prompt_tokens"], figures["num_output_tokens"]) == (8 * number, 4 * number)
    assert figures["targets"]["label"] == "MLPerf-like llama3.1-8b-server"
    bodies = [body for method, path, body in gateway.asked if path == "/v1/completions"]
    assert len({tuple(body["prompt"]) for body in bodies}) == number


def test_warm_up_does_not_count(run: Run, gateway: FakeGateway) -> None:
    result = run("bench", "tiny", "--scenario", "single", "--requests", "2", "--warm-up", *SHORT, "--json")
    assert json.loads(result.stdout)["num_completed"] == 2
    assert [path for _, path, _ in gateway.asked].count("/v1/completions") == 3


def test_failed_requests_are_shown_and_give_status_1(run: Run, gateway: FakeGateway) -> None:
    gateway.is_full = True
    result = run("bench", "acme/tiny", "--scenario", "single", "--requests", "2", *SHORT, "--url", gateway.url + "/v1/")
    assert result.exit_code == 1, result.output
    assert "2 requests failed: the queue is full" in result.stdout


@pytest.mark.parametrize("options", [("single",), ("multi", "--at-once", "2"), ("cold", "--wait", "0")])
def test_load_does_not_spin_on_requests_that_fail_at_once(
    run: Run, gateway: FakeGateway, options: tuple[str, ...]
) -> None:
    gateway.is_full = True
    result = run("bench", "tiny", "--scenario", *options, "--duration", "0.6", *SHORT, "--json")
    assert result.exit_code == 1, result.output
    assert 1 <= json.loads(result.stdout)["num_failed"] <= 4


def test_table_names_load_targets_and_what_was_not_measured(run: Run, gateway: FakeGateway, home: Home) -> None:
    home.endpoints_file.unlink()  # no local platform, hence no admin key
    command = ("bench", "tiny", "--scenario", "single", "--requests", "2", "--target", "9,9", *SHORT)
    result = run(*command, "--url", gateway.url, "--device-price", "2.5")
    assert result.exit_code == 0, result.output
    for text in ("single: one after another, 2 requests", "100.0%  your targets", "not measured: needs the admin key"):
        assert text in result.stdout, result.stdout
    cold = refusal(run("bench", "tiny", "--scenario", "cold", "--url", gateway.url, *SHORT))
    assert cold.message == "--scenario cold needs the admin key, to see the model at zero"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scenario", "single", "--rate", "2"), "--rate has no effect with --scenario single"),
        (("--scenario", "offline", "--duration", "9"), "--duration has no effect with --scenario offline"),
        (("--rate", "1000", "--duration", "86400"), "--rate and --duration give more than 1,000,000 requests"),
        (
            ("--scenario", "burst", "--at-once", "9999", "--every", "0.1", "--duration", "99"),
            "--at-once and --duration give more than 1,000,000 requests",
        ),
        (("--scenario", "trace"), "--scenario trace needs --trace"),
        (("--prompt", "512", "--answer", "1"), "a prompt of 512 and an answer of 1 tokens exceed the model's context"),
        (("--shared-prefix", "9"), "--shared-prefix 9 exceeds a prompt of 8"),
        (("--rate", "0.001", "--duration", "1"), "no request is due in the load"),
        (("--output", "/nowhere/result.json"), "--output: /nowhere is not a folder"),
        (("--admin-key", TENANT_KEY), "--admin-key is a tenant's key"),
        (("--admin-key", "tra-unknown"), "--admin-key: the key is not known"),
    ],
)
def test_bad_input_names_the_option(run: Run, options: tuple[str, ...], message: str) -> None:
    error = refusal(run("bench", "tiny", *SHORT, *options))
    assert error.message.startswith(message) and error.hint


def test_model_that_stays_loaded_is_never_cold(run: Run, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL, "min_instances", 1)
    error = refusal(run("bench", "tiny", "--scenario", "cold", *SHORT))
    assert error.message == "acme/tiny is never at zero: min_instances is 1"
    assert error.hint == "torchrelay models set acme/tiny --min-instances 0"
    monkeypatch.setitem(MODEL, "min_instances", 0)
    monkeypatch.setitem(MODEL, "schedule", ["Mon-Fri 08:00-18:00 UTC 1"])
    error = refusal(run("bench", "tiny", "--scenario", "cold", *SHORT))
    assert error.message == "acme/tiny has a schedule, which may keep it loaded"
    assert error.hint == "torchrelay models set acme/tiny --schedule none"


def test_figures_of_a_cold_load_are_printed_before_its_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    num_waits = 0

    async def zero(self: DeviceWatch) -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits > 3:  # before the load, and before each request
            raise CliError("the model did not go to zero")

    monkeypatch.setattr(DeviceWatch, "zero", zero)
    result = run("bench", "tiny", "--scenario", "cold", "--wait", "0", *SHORT, "--json")
    figures = json.loads(result.stdout)
    assert (figures["num_completed"], figures["is_complete"]) == (2, False)
    assert refusal(result).message == "the model did not go to zero"
    num_waits = 3
    assert not run("bench", "tiny", "--scenario", "cold", *SHORT).stdout
