"""`torchrelay advise`, as an operator runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.unit.cli.advise.test_ledger_day import VIEW, row
from tests.unit.cli.conftest import Run, refusal
from tests.unit.cli.fake_gateway import TENANT_KEY, FakeGateway
from torchrelay.cli.advise import ledger_day
from torchrelay.cli.home import Home
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Effects
from torchrelay.scheduler.policy.inputs import Input
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.service.input_log import InputRecorder, PolicyStart
from torchrelay.sim.fleets import served_model
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.scenario import Fleet, Request

SMALL = replace(served_model("t/small", 1, 8, 32, 131072, 2.0, 15e3, 0.1), ttft_prompt_factor=0.0)
FLEET = Fleet(2, (1,), 12.5e9, 25e9, 2.5e9, 480 * 10**9)


class _RecordedPolicy(Policy):
    recorder: InputRecorder

    def apply(self, input_: Input, now: float) -> Effects:
        self.recorder.record(input_, now)
        return super().apply(input_, now)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of a scheduler with an idle second host."""
    path, ids, config = tmp_path / "inputs.jsonl", count(1), PolicyConfig()
    policy = _RecordedPolicy(config, lambda: f"i-{next(ids):06d}", START_S)
    requests = [Request(f"r{number}", 4.0 * number, SMALL.name, 500, 50) for number in range(12)]
    with path.open("wb") as file:
        policy.recorder = InputRecorder(file, PolicyStart(config, START_S, "i"))
        Plant(policy, FLEET, [SMALL]).run(requests)
    return path


def test_log_gives_advice_with_its_basis(run: Run, log: Path) -> None:
    shown = run("advise", "--replay", str(log), "--json")
    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.stdout)
    best = said["advice"][0]
    assert best["change"] == "one host fewer" and best["dollars_saved_per_day"] == pytest.approx(60, rel=0.05)
    assert best["rests_on"] == "simulated, 12 requests" and len(said["advice"]) <= 3
    checks = {check["figure"]: check for check in said["checks"]}
    assert checks["attained"]["simulated"] == pytest.approx(checks["attained"]["measured"], abs=0.1)
    assert checks["device seconds"]["simulated"] == pytest.approx(checks["device seconds"]["measured"], rel=0.25)
    assert said["weak_because"] == ["it rests on 12 requests"]
    table = run("advise", "--replay", str(log)).stdout
    assert "one host fewer" in table and "nothing was changed" in table and "weak advice: it rests on" in table
    free = run("advise", "--replay", str(log), "--device-price", "0", "--ram-price", "0", "--late-price", "0")
    assert "nothing to advise" in free.stdout


def test_ledger_gives_advice(run: Run, home: Home, gateway: FakeGateway) -> None:
    gateway.view = VIEW
    assert "nothing to advise: no request ended" in str(refusal(run("advise")))
    gateway.requests = [row(f"r{number}", 0.1 * number, took_s=1.0) for number in range(520)]
    shown = run("advise", "--hours", "1", "--json")
    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.stdout)
    assert said["num_requests"] == said["num_simulated"] == 520
    assert said["advice"][0]["change"] == "one slot fewer per host"
    assert said["advice"][0]["command"] == "torchrelay up --prefill-workers 0 --decode-workers 0 --both-workers 1"
    assert [check["figure"] for check in said["checks"]] == ["time of an answer, P50"]


def test_note_says_that_the_ledger_was_cut_off(
    run: Run, home: Home, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_day, "_PAGE", 10)
    monkeypatch.setattr(ledger_day, "_MOST_REQUESTS", 20)
    gateway.view = VIEW
    gateway.requests = [row(f"r{number}", 0.1 * number) for number in range(21)]
    gateway.requests[0]["status"] = "running"
    note = "only the last 19 requests of the 24 hours were read"
    assert note in json.loads(run("advise", "--json").stdout)["notes"]
    gateway.requests.pop()
    assert note not in json.loads(run("advise", "--json").stdout)["notes"]


def test_wrong_logs_and_keys_are_refused(run: Run, home: Home, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("not a log\n")
    assert "is not a log of torchrelay-scheduler --record" in str(
        refusal(run("advise", "--replay", str(tmp_path / "log")))
    )
    assert "advise requires the admin key" in str(refusal(run("advise", "--key", TENANT_KEY)))
