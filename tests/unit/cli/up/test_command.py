"""Options of `torchrelay up`, and the faults that it refuses before it starts anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run, refusal
from torchrelay.cli.home import Home
from torchrelay.cli.up import command
from torchrelay.cli.up import run as run_module
from torchrelay.cli.up.flags import check_device
from torchrelay.cli.up.plan import UpOptions
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.param_store.settings import StoreSettings
from torchrelay.scheduler.settings import SchedulerSettings

WRONG = [("--http-port", "99999"), ("--grpc-port", "-1"), ("--log-level", "loud")]


def test_invalid_option_or_variable_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check_device(device) for device in ("cpu", "cuda", "cuda:11")] == ["cpu", "cuda", "cuda:11"]
    for option, value in (*WRONG, ("--device", "gpu"), ("--device", "cuda:")):
        refused = run("up", "--home", str(tmp_path / "home"), option, value)
        assert refused.exit_code == 2
        assert f"Invalid value for '{option}'" in refused.stderr
    monkeypatch.setenv("TORCHRELAY_HTTP_PORT", "many")
    refused = run("up", "--home", str(tmp_path / "home"))
    assert refused.exit_code == 2
    assert "TORCHRELAY_HTTP_PORT" in refused.stderr
    assert not (tmp_path / "home").exists()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[UpOptions]:
    """The options of each platform that would have been started."""
    started: list[UpOptions] = []

    async def run_up(home: Home, options: UpOptions, is_quiet: bool = False) -> None:
        started.append(options)

    monkeypatch.setattr(run_module, "run_up", run_up)
    return started


VARIABLES = {
    "TORCHRELAY_HOST": "0.0.0.0",
    "TORCHRELAY_HTTP_PORT": "18080",
    "TORCHRELAY_GRPC_PORT": "17301",
    "TORCHRELAY_REMOTE_URL": "s3://bucket/packs",
    "TORCHRELAY_IDLE_TIMEOUT_S": "5.5",
    "TORCHRELAY_THREADS": "3",
    "TORCHRELAY_DEVICE": "auto",
    "TORCHRELAY_LOG_LEVEL": "WARNING",
    "TORCHRELAY_POOL_MODE": "advise",
    "TORCHRELAY_SCALING": "advise",
}


def test_option_overrides_variable(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[UpOptions]
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    home = ("--home", str(tmp_path / "home"))
    assert run("up", *home).exit_code == 0
    assert run("up", *home, "--http-port", "8081", "--device", "cpu", "--log-level", "debug").exit_code == 0
    expected = UpOptions(
        host="0.0.0.0",
        http_port=18080,
        grpc_port=17301,
        remote="s3://bucket/packs",
        idle_timeout_s=5.5,
        threads=3,
        device="auto",
        log_level="warning",
        pool_mode="advise",
        scaling="advise",
    )
    assert started == [expected, replace(expected, http_port=8081, device="cpu", log_level="debug")]


@pytest.mark.usefixtures("started")
def test_ignored_variables_are_reported(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name for each in (GatewaySettings, SchedulerSettings, StoreSettings) for name in each.model_fields}
    for name in (*others, "api_url", "api_key", "config", "http_prot", "metric_port"):
        if f"TORCHRELAY_{name.upper()}" not in VARIABLES:
            monkeypatch.setenv(f"TORCHRELAY_{name.upper()}", "3")
    monkeypatch.setenv("TORCHRELAY_LATE_COST", "5")
    said = run("up", "--home", str(tmp_path / "home")).stderr.splitlines()
    misspelt = [
        f"torchrelay: TORCHRELAY_{wrong} is not a setting and is ignored; did you mean TORCHRELAY_{right}?"
        for wrong, right in (("HTTP_PROT", "HTTP_PORT"), ("METRIC_PORT", "METRICS_PORT"))
    ]
    why = SchedulerSettings.ended["late_cost"]
    ended = f"torchrelay: TORCHRELAY_LATE_COST is not a setting any more and is ignored: {why}"
    assert sorted(said) == sorted([*misspelt, ended])


def test_misspelt_config_key_is_refused_before_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[UpOptions]
) -> None:
    file = tmp_path / "settings.toml"
    monkeypatch.setenv("TORCHRELAY_CONFIG", str(file))
    for key, meant in (
        ("http_prot", "http_port"),  # the gateway's
        ("queue_limits", "queue_limit"),  # the scheduler's
        ("arena_byte", "arena_bytes"),  # the param-store's
        ("kv_pool_byte", "kv_pool_bytes"),  # the worker's
    ):
        file.write_text(f"{key} = 1\n")
        problem = refusal(run("up", "--home", str(tmp_path / "home")))
        assert problem.message == f"{file}: {key!r} is not a setting; did you mean {meant!r}?"
    assert not started


@pytest.mark.parametrize("host", ["203.0.113.7", "a..b", "2001:db8::7", "[2001:db8::7]"])
def test_foreign_listen_address_has_message(run: Run, tmp_path: Path, host: str) -> None:
    problem = refusal(run("up", "--home", str(tmp_path), "--host", host))
    assert problem.message == f"this machine cannot listen on {host.strip('[]')}"


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (("--device", "cpu"), (1, 1, 0)),
        (("--device", "auto"), (0, 0, 4)),
        (("--device", "cuda:1"), (0, 0, 3)),
        (("--device", "auto", "--devices", "2"), (0, 0, 2)),
        (("--device", "auto", "--prefill-workers", "1", "--decode-workers", "1"), (1, 1, 0)),
        (("--device", "auto", "--both-workers", "2"), (0, 0, 2)),
        (("--device", "auto", "--workers", "0..4"), (0, 0, 4)),
    ],
)
def test_each_gpu_has_one_worker_for_both_roles(
    options: tuple[str, ...],
    counts: tuple[int, int, int],
    run: Run,
    tmp_path: Path,
    started: list[UpOptions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "visible_gpus", lambda: ("0", "1", "2", "3"))
    assert run("up", "--home", str(tmp_path / "home"), *options).exit_code == 0
    (up,) = started
    assert (up.num_prefill_workers, up.num_decode_workers, up.num_both_workers) == counts
    assert up.gpus == (() if up.device == "cpu" else ("0", "1", "2", "3"))


def test_range_of_workers_replaces_the_counts(run: Run, tmp_path: Path, started: list[UpOptions]) -> None:
    """With an engine of jobs, all of them are there."""
    home = ("--home", str(tmp_path / "home"))
    assert run("up", *home, "--workers", "0..2").exit_code == 0
    assert started == [UpOptions(num_prefill_workers=0, num_decode_workers=0, num_both_workers=2, least_workers=0)]
    assert run("up", *home, "--cluster-host", "10.0.0.5", "--workers", "1..4", "--on", "slurm").exit_code == 0
    _, there = started
    assert (there.on, there.num_remote_workers, there.least_workers) == ("slurm", 4, 1)
    assert there.num_prefill_workers + there.num_decode_workers + there.num_both_workers == 0
    for wrong in ("2", "0..0", "3..2", "a..b"):
        said = run("up", *home, "--workers", wrong)
        assert said.exit_code != 0 and "--workers" in said.stderr, wrong
    for other in (("--pool-mode", "advise"), ("--devices", "2")):
        said = run("up", *home, "--workers", "0..2", *other)
        assert str(said.exception) == f"--workers and {other[0]} exclude each other"
    assert "--on" in run("up", *home, "--workers", "0..2", "--on", "mesos").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cluster-host", "10.0.0.5"), "--on ray needs the least and the most workers"),
        (("--workers", "0..2", "--pod", "p.yaml"), "--pod is for workers on Kubernetes"),
        (("--workers", "0..2"), "--on ray needs an address at which its machines reach this one"),
        (("--workers", "0..2", "--cluster-host", "10.0.0.5", "--tls"), "--on and --tls exclude each other"),
        (
            ("--workers", "0..2", "--cluster-host", "10.0.0.5", "--on", "kubernetes"),
            "--on kubernetes needs the manifest of a worker's pod",
        ),
    ],
)
def test_engine_of_jobs_has_its_needs(run: Run, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert refusal(run("up", "--home", str(tmp_path / "home"), "--on", "ray", *options)).message == message
