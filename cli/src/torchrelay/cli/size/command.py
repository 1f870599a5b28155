"""`torchrelay size`: what a model needs, on which devices, and what they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from torchrelay.cli.api.access import Access, HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.commands.upload import Quantization
from torchrelay.cli.errors import ApiError, CliError, Unreachable
from torchrelay.cli.home import Home
from torchrelay.cli.size.report import size_json, size_report, validation_table
from torchrelay.cli.size.subject import Subject, subject_of, subject_of_reply
from torchrelay.cli.size.this_machine import NAME as THIS_MACHINE
from torchrelay.cli.size.this_machine import this_machine
from torchrelay.cli.views import console
from torchrelay.modelspec.sizing.devices import (
    Device,
    DeviceFault,
    devices_named,
    published_devices,
    with_own_devices,
)
from torchrelay.modelspec.sizing.offers import Offer, learned_offer, offers
from torchrelay.modelspec.sizing.operating_point import Workload, point_at_rate

EXAMPLE = (
    "Example:  torchrelay size Qwen/Qwen3-8B --rate 5 --prompt 1024 --answer 256\n\n"
    "Your prices:  torchrelay size ./model --devices-file prices.toml   (each as [h100_sxm] and price = 2.10)\n\n"
    "Check it:  torchrelay size glossary --rate 2 --prompt 128 --answer 64 --validate"
)
MAX_TOKENS = 10_000_000
_PROMPT, _ANSWER = 1024, 256


def size(
    model: Annotated[str, typer.Argument(help="A folder, OWNER/NAME of the hub, or a model of the platform.")],
    rate: Annotated[float, typer.Option(min=0.001, max=1e6, help="Requests per second.")] = 5.0,
    prompt: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_TOKENS, help="Tokens of a prompt; default: 1024, or what fits."),
    ] = None,
    answer: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_TOKENS, help="Tokens of an answer; default: 256, or what fits."),
    ] = None,
    ttft: Annotated[float, typer.Option(min=0.001, max=86400, help="Target: seconds to the first token.")] = 0.5,
    tbt: Annotated[float, typer.Option(min=0.001, max=86400, help="Target: seconds between tokens.")] = 0.03,
    device: Annotated[
        str | None, typer.Option(help="Only this device, or this family: h100, this_machine.", metavar="NAME")
    ] = None,
    devices_file: Annotated[
        Path | None,
        typer.Option(help="TOML with your prices or devices: a table each.", exists=True, dir_okay=False),
    ] = None,
    quantize: Annotated[
        Quantization | None, typer.Option(help="As if the linear layers were in 8 bits: about half the memory.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model of the hub.")] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Send such requests to the platform for 10 s, and compare.")
    ] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate what a model needs: memory, devices, speed, cost and cold starts.

    Devices are listed with the cheapest that meets the targets first. No weights are read, and no GPU or platform is
    needed for a folder or a model of the hub. For a model of the platform, times that its workers have measured count.
    """
    work = Workload(rate, prompt or _PROMPT, answer or _ANSWER, ttft, tbt)
    devices = _devices(devices_file, device)

    def of_platform(name: str) -> Subject | None:
        return _subject_of_platform(home, url, key, name, work)

    subject = subject_of(model, revision, quantize is not None, of_platform)
    if (longest := subject.footprint.max_context_tokens) < work.num_tokens:
        if prompt or answer or longest < 2:
            fault = f"--prompt {work.num_prompt} and --answer {work.num_answer} exceed the model's context of"
            raise CliError(f"{fault} {longest:,} tokens", "give fewer tokens of both")
        work = replace(work, num_prompt=longest - longest // 4, num_answer=longest // 4)
    if validate and not subject.vocab_size:
        raise CliError("--validate needs a model of the platform", "give its name: torchrelay models")
    made = [*_learned_offers(subject, work, device), *offers(subject.footprint, devices, work)]
    shown = size_json(subject, made, work)
    if not as_json:
        console.out().print(size_report(subject, made, work))
    if validate:
        access = tenant_access(home, url, key, subject.name)
        access.require_tenant("--validate, whose requests are billed,")
        shown["validation"] = _validated(access, subject, work, as_json)
    if as_json:
        console.print_json(shown)


def _devices(file: Path | None, name: str | None) -> Sequence[Device]:
    """The devices to choose from, and this machine. Raises ``CliError``."""
    if name == THIS_MACHINE:
        return (this_machine(),)
    try:
        listed = published_devices() if file is None else with_own_devices(file.read_text())
        return (*listed, this_machine()) if name is None else devices_named(listed, name)
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not valid UTF-8", "write it as TOML") from error
    except DeviceFault as error:
        if error.field == "device":
            raise CliError(f"--{error}, and {THIS_MACHINE}", "choose one, or leave --device out for all") from error
        raise CliError(f"--devices-file: {file}: {error}", "see docs/sizing.md for the fields") from error


def _subject_of_platform(
    home: Path | None, url: str | None, key: str | None, name: str, work: Workload
) -> Subject | None:
    """The model, if there is a platform that has it. A name without a tenant can be nothing else, so that a platform
    which does not answer is an error.
    """
    is_name, query = "/" not in name, {"model": name, "prompt": work.num_prompt, "answer": work.num_answer}
    if not is_name and url is None and Home.at(home).running_pid() is None:
        return None
    try:
        with tenant_access(home, url, key, name).client() as client:
            return subject_of_reply(client.call("GET", "/v1/sizing", params=query))
    except ApiError as error:
        if error.status == 404 and not is_name:
            return None
        raise
    except Unreachable:
        if is_name:
            raise
        return None


def _learned_offers(subject: Subject, work: Workload, device: str | None) -> list[Offer]:
    if subject.learned is None or device is not None:
        return []
    unknown = Device("this_platform", 0.0, 0.0, 0.0, 0.0, 0.0, origin="measured")
    kv_tokens = subject.learned.kv_pool_bytes / subject.footprint.kv_bytes_per_token
    return [learned_offer(subject.learned.steps, subject.footprint, unknown, work, kv_tokens)]


def _validated(access: Access, subject: Subject, work: Workload, as_json: bool) -> dict[str, object]:
    """Sends the load; returns predicted and measured figures. The prediction is of before the load."""
    if subject.learned is None:
        raise CliError(
            f"no worker has measured steps of {subject.name} or of another model yet",
            f"call it first: torchrelay chat {subject.name} Hello",
        )
    point = point_at_rate(subject.learned.steps, work, work.requests_per_s)
    if point is None:
        raise CliError(f"--rate {work.requests_per_s:g} is more than an instance is known to attain", "lower --rate")
    from torchrelay.cli.bench.bodies import Prompts
    from torchrelay.cli.bench.load_client import LoadClient
    from torchrelay.cli.size import load

    times = load.arrivals(work.requests_per_s)
    # The load lasts until the last request that arrives has its answer.
    predicted_s = times[-1] + point.ttft_s + (work.num_answer - 1) * point.tbt_s
    tokens_per_s = len(times) * work.num_answer / predicted_s
    predicted = {"tokens_per_s": tokens_per_s, "ttft_s": point.ttft_s, "tbt_s": point.tbt_s}
    answered = load.drive(LoadClient(access, subject.name, Prompts(subject.vocab_size)), work, times)
    measured = load.figures(answered)
    if not as_json:
        console.out().print(validation_table(predicted, measured, len(answered)))
    return {"predicted": predicted, "measured": measured, "num_requests": len(answered)}
