"""`torchrelay size` on folders and models of a platform."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.cli.conftest import CONFIG, Run, refusal
from tests.unit.cli.fake_gateway import FakeGateway
from torchrelay.cli.bench.answered import Answered
from torchrelay.cli.home import Home
from torchrelay.cli.size.load import arrivals, figures
from torchrelay.cli.size.report import command, size_report
from torchrelay.cli.size.subject import Subject, subject_of_reply
from torchrelay.cli.size.this_machine import this_machine
from torchrelay.modelspec.sizing.devices import published_devices
from torchrelay.modelspec.sizing.footprint import footprint_of, footprint_of_bytes
from torchrelay.modelspec.sizing.offers import offers
from torchrelay.modelspec.sizing.operating_point import Workload
from torchrelay.modelspec.sizing.roofline import LearnedSteps, LinearCost

MODEL = footprint_of_bytes(16e9, 2, 150_000, 8192)
WORK = Workload(5.0, 1024, 256, 0.5, 0.03)
SMALL = ("--prompt", "100", "--answer", "32")


def reply(steps: LearnedSteps | None) -> dict[str, Any]:
    shown = None if steps is None else asdict(steps) | {"kv_pool_bytes": 1e9}
    return {"model": "acme/tiny", "vocab_size": 512, "footprint": asdict(footprint_of(CONFIG)), "steps": shown}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_folder_needs_no_platform_and_no_weights(run: Run, folder: Path) -> None:
    sized = json.loads(run("size", str(folder), *SMALL, "--json").stdout)
    assert sized["weights"]["origin"] == "estimated"
    assert {offer["device"] for offer in sized["offers"]} > {"h100_sxm", "this_machine"}
    assert sized["command"].startswith(f"torchrelay models set {folder.name.lower()} ")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    sized = json.loads(run("size", str(folder), *SMALL, "--device", "h100", "--json").stdout)
    assert sized["weights"] == {"bytes": 1000, "int8_bytes": sized["weights"]["int8_bytes"], "origin": "measured"}
    assert len(sized["offers"]) == 2


def test_lengths_that_are_not_given_fit_the_context(run: Run, folder: Path) -> None:
    result = run("size", str(folder))
    assert result.exit_code == 0 and "requests/s of 384 + 128 tokens" in result.stdout


def test_an_index_alone_gives_the_size(run: Run, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 4321}}')
    sized = json.loads(run("size", str(folder), *SMALL, "--device", "t4", "--json").stdout)
    assert sized["weights"]["bytes"] == 4321


def test_own_prices_change_the_order(run: Run, folder: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[b200]\nprice = 0.01")
    sized = run("size", str(folder), *SMALL, "--devices-file", str(prices), "--json")
    assert json.loads(sized.stdout)["offers"][0]["device"] == "b200"
    prices.write_text("[b200]\nprice = true")
    refused = refusal(run("size", str(folder), "--devices-file", str(prices)))
    assert "b200.price: write a number above 0" in refused.message


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({}, ("--prompt", "600"), "--prompt 600 and --answer 256 exceed the model's context of 512 tokens"),
        ({}, (*SMALL, "--device", "h9"), "'h9' is unknown"),
        ({}, (*SMALL, "--validate"), "--validate needs a model of the platform"),
        ({"hidden_size": 0}, (), "hidden_size must be a positive whole number"),
        ({"architectures": ["LlamaModel"]}, (), "architectures: the model gives embeddings"),
        ({"quantization_config": {"quant_method": "fp8"}}, ("--quantize", "int8"), "activation_scheme"),
    ],
)
def test_errors_name_the_field(run: Run, folder: Path, change: dict[str, Any], options: list[str], said: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    assert said in refusal(run("size", str(folder), *options)).message


def test_a_model_of_the_platform_uses_learned_times(run: Run, home: Home, gateway: FakeGateway) -> None:
    cost = LinearCost(0.004, 1e-4, 1e-8)
    gateway.sizing = reply(LearnedSteps(cost, cost, 512))
    sized = json.loads(run("size", "tiny", *SMALL, "--json").stdout)
    assert (sized["offers"][0]["device"], sized["offers"][0]["origin"]) == ("this_platform", "measured")
    assert "prompt=100" in gateway.asked[-1][1]
    assert "is published already" in refusal(run("size", "tiny", *SMALL, "--quantize", "int8")).message
    gateway.sizing = reply(None)
    assert {offer["origin"] for offer in json.loads(run("size", "tiny", *SMALL, "--json").stdout)["offers"]} == {
        "estimated"
    }


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_whole_at_usual_widths(width: int) -> None:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(size_report(Subject("mine", MODEL, False), offers(MODEL, published_devices(), WORK), WORK))
    text = captured.get()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert "estimated" in text and "published" in text and "Not within the targets: cpu_16" in text


def test_the_command_means_the_offer() -> None:
    (offer,) = [each for each in offers(MODEL, published_devices(), WORK) if each.device == "h100_sxm"]
    targets = "--standard-ttft-s 0.5 --tbt-target-s 0.03"
    late = offer.cold_start_s | {"host": 2.0}
    several = replace(offer, num_instances=3, num_together=2, cold_start_s=late)
    expected = f"torchrelay models set 'a b' --min-instances 1 --max-instances 3 --engine vllm:2 {targets}"
    assert command("a b", several, WORK) == expected
    early = replace(offer, cold_start_s=offer.cold_start_s | {"host": 0.1})
    assert command("mine", early, WORK) == f"torchrelay models set mine --max-instances 1 {targets}"


def test_figures_are_means_of_the_requests() -> None:
    answered = [
        Answered(0.0, 0.0, 0.4, first_s=0.1, last_s=0.4, num_output_tokens=4),
        Answered(1.0, 1.0, 2.0, first_s=1.3, last_s=2.0, num_output_tokens=8),
    ]
    measured = figures(answered)
    assert measured == pytest.approx({"tokens_per_s": 6.0, "ttft_s": 0.2, "tbt_s": 0.1})
    times = arrivals(5.0)
    assert times[0] == 0 and len(times) == 50 and times == sorted(times)


def test_the_probe_is_quick_and_positive() -> None:
    device = this_machine()
    assert device.bytes_per_s > 1e8 and device.flops > 1e9 and device.memory_bytes > 1e8


def test_a_reply_is_read_whole() -> None:
    subject = subject_of_reply(reply(None) | {"hosts": {"fit": 2, "total": 3}})
    assert (subject.name, subject.vocab_size, subject.hosts) == ("acme/tiny", 512, {"fit": 2, "total": 3})
