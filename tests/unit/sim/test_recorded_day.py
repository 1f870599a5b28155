"""A log that a scheduler recorded, read as models, cluster and requests."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.systems import app
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Effects
from torchrelay.scheduler.policy.inputs import Input
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.service.input_log import InputRecorder, PolicyStart
from torchrelay.sim.fleets import served_model
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.recorded_day import read_recorded_day
from torchrelay.sim.scenario import Fleet, Request
from torchrelay.sim.setup import one_copy_each
from torchrelay.sim.summary import summarize

SMALL = replace(served_model("t/small", 1, 8, 32, 131072, 2.0, 15e3, 0.1), ttft_prompt_factor=0.0)
PAIR = replace(served_model("t/pair", 2, 24, 40, 163840, 2.0, 12e3, 0.1), ttft_prompt_factor=0.0)
FLEET = Fleet(2, (2, 1, 1), 12.5e9, 25e9, 2.5e9, 480 * 10**9)
REQUESTS = [
    Request(f"r{number}", 0.7 * number, (SMALL, PAIR)[number % 3 == 0].name, 400 + 10 * number, 20 + number % 7)
    for number in range(60)
]


class RecordedPolicy(Policy):
    recorder: InputRecorder

    def apply(self, input_: Input, now: float) -> Effects:
        self.recorder.record(input_, now)
        return super().apply(input_, now)


@pytest.fixture(scope="module")
def plant_and_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plant, Path]:
    """A simulated cluster that served ``REQUESTS``, and its scheduler's log."""
    path, ids, config = tmp_path_factory.mktemp("day") / "inputs.jsonl", count(1), PolicyConfig(idle_timeout_s=7.0)
    policy = RecordedPolicy(config, lambda: f"i-{next(ids):06d}", START_S)
    with path.open("wb") as log:
        policy.recorder = InputRecorder(log, PolicyStart(config, START_S, "i"))
        plant = Plant(policy, FLEET, [SMALL, PAIR], held=one_copy_each(FLEET, [SMALL, PAIR]))
        plant.run(REQUESTS)
    return plant, path


def test_log_gives_models_cluster_and_requests(plant_and_log: tuple[Plant, Path]) -> None:
    plant, log = plant_and_log
    day = read_recorded_day(log)
    for model, served in zip(sorted(day.models, key=lambda model: model.name), (PAIR, SMALL), strict=True):
        assert model.prefill_tokens_per_s == pytest.approx(served.prefill_tokens_per_s)
        assert model == replace(served, prefill_tokens_per_s=model.prefill_tokens_per_s)
    begin = min(request.arrives_at for request in REQUESTS)
    expected = [
        (request.request_id, request.model, request.num_prompt_tokens, request.num_output_tokens)
        for request in REQUESTS
    ]
    read = [
        (request.request_id, request.model, request.num_prompt_tokens, request.num_output_tokens)
        for request in day.requests
    ]
    assert read == expected and not day.without_latency
    assert [request.arrives_at for request in day.requests] == pytest.approx(
        [request.arrives_at - begin for request in REQUESTS], abs=1e-6
    )
    assert (day.fleet.num_hosts, day.fleet.groups, day.fleet.arena_bytes) == (2, (2, 1, 1), FLEET.arena_bytes)
    assert day.config.idle_timeout_s == 7.0
    assert day.span_s == pytest.approx(plant.events.now - plant.outcomes[0].arrived_at, abs=1.0)
    assert day.span_s > day.requests[-1].arrives_at
    truth = summarize(plant.outcomes, plant.served, plant.at_last_arrival)
    assert day.measured.attainment == truth.attainment and day.measured.num_refused == 0
    assert day.measured.ttft_p95_s == pytest.approx(truth.ttft_p95_s, abs=0.01)
    assert day.measured.num_loads == plant.spent_now().num_loads
    assert day.measured.device_s == pytest.approx(plant.spent_now().device_s, rel=0.05)


def test_day_is_simulated_with_another_policy(plant_and_log: tuple[Plant, Path]) -> None:
    command = ["--replay", str(plant_and_log[1]), "--policy", "ours", "--policy", "serverlessllm", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    recorded, ours, rival = json.loads(result.stdout)["policies"]
    assert [row["policy"] for row in (recorded, ours, rival)] == ["recorded", "ours", "serverlessllm"]
    assert recorded["num_requests"] == ours["num_requests"] == rival["num_requests"] == len(REQUESTS)
    assert ours["device_s"] == pytest.approx(recorded["device_s"], rel=0.5)
    assert ours["attainment"] == pytest.approx(recorded["attainment"], abs=0.1)


def test_bad_logs_are_refused_with_the_cause(tmp_path: Path, plant_and_log: tuple[Plant, Path]) -> None:
    lines = plant_and_log[1].read_bytes().splitlines(keepends=True)
    broken, empty, unlearned = tmp_path / "broken", tmp_path / "empty", tmp_path / "unlearned"
    broken.write_text("not a log\n")
    empty.write_bytes(lines[0])
    unlearned.write_bytes(b"".join(lines[: next(n for n, line in enumerate(lines) if b"Admit" in line) + 1]))
    for path, cause in (
        (broken, "is not a log of torchrelay-scheduler --record"),
        (empty, "has no request"),
        (unlearned, "no worker has learned how long the steps of"),
    ):
        with pytest.raises(ValueError, match=cause):
            read_recorded_day(path)
