"""`torchrelay bench`: a load on a model of the platform, and what it measured."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import Access, HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.api.client import GatewayClient, clean_key
from torchrelay.cli.bench.targets import Targets, read_targets
from torchrelay.cli.bench.workload import Scenario, Workload, bounds_of
from torchrelay.cli.commands.model_details import ModelArgument
from torchrelay.cli.commands.prices import current_price
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.views import console

if TYPE_CHECKING:
    from torchrelay.cli.bench.devices import DeviceWatch
    from torchrelay.cli.bench.measurement import Measurement
    from torchrelay.cli.bench.report import Result
    from torchrelay.sim.traces import Arrival

EXAMPLE = (
    "Example:  torchrelay bench glossary --scenario server --rate 4 --duration 60 --prompt 64 --answer 32\n\n"
    "From zero:  torchrelay bench glossary --scenario cold --requests 5 --prompt 64 --answer 8\n\n"
    "A trace:  torchrelay bench glossary --scenario trace --trace arrivals.csv --prompt 512 --answer 128"
)
_SCENARIO = (
    "single: one after another; multi: several at once; server: Poisson arrivals; offline: all at once; burst: quiet, "
    "then several at once; trace: recorded arrivals; cold: calls at random times to the model at zero."
)
_TARGET = (
    "Seconds to the first token and per further token, as 0.5,0.03, or those of MLPerf: llama3.1-8b, llama2-70b, "
    "llama3.1-405b or deepseek-r1, each with -server or -interactive."
)
_MAX_TOKENS = 10_000_000
_MAX_REQUESTS = 1_000_000
_PROMPT, _ANSWER = 512, 128
# Options that only some scenarios use.
_USED_BY = {
    "duration": tuple(each for each in Scenario if each != Scenario.OFFLINE),
    "rate": (Scenario.SERVER,),
    "at-once": (Scenario.MULTI, Scenario.BURST),
    "every": (Scenario.BURST,),
    "wait": (Scenario.COLD,),
    "trace": (Scenario.TRACE,),
}


def _targets(text: str) -> str:
    try:
        read_targets(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def bench(
    model: ModelArgument,
    scenario: Annotated[Scenario, typer.Option(help=_SCENARIO)] = Scenario.SERVER,
    duration: Annotated[
        float | None, typer.Option(min=0.1, max=86400, help="Seconds in which requests begin; default: 60.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MAX_REQUESTS, help="Most requests; default: 100 of offline, 5 of cold, otherwise any."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=1000, help="Of server: requests per second; default: 4.")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Of multi and burst: requests at a time; default: 8.")
    ] = None,
    every: Annotated[
        float | None, typer.Option(min=0.1, max=86400, help="Of burst: seconds between two; default: 10.")
    ] = None,
    wait: Annotated[
        float | None, typer.Option(min=0, max=86400, help="Of cold: most seconds at zero before a call; default: 5.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Of trace: a CSV file with TIMESTAMP, ContextTokens, GeneratedTokens.", dir_okay=False, exists=True
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, max=_MAX_TOKENS, help="Tokens of a prompt; default: 512. Of trace: at most.")
    ] = None,
    answer: Annotated[
        int | None, typer.Option(min=1, max=_MAX_TOKENS, help="Tokens of an answer; default: 128. Of trace: at most.")
    ] = None,
    shared_prefix: Annotated[
        int, typer.Option(min=0, max=_MAX_TOKENS, help="First tokens that all prompts have in common.")
    ] = 0,
    target: Annotated[
        str, typer.Option(help=_TARGET, metavar="NAME|TTFT,TPOT", callback=_targets)
    ] = "llama3.1-8b-server",
    device_price: Annotated[float | None, typer.Option(min=0, help="Dollars per hour of a device.")] = None,
    warm_up: Annotated[bool, typer.Option("--warm-up", help="First send a request that does not count.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of random times.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file, too.", dir_okay=False)] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar="TORCHRELAY_ADMIN_KEY", help="To see devices; default: the local platform's.", metavar="KEY"
        ),
    ] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a model through the public API, and measure latency, goodput, devices and cost (MLPerf-like).

    The requests are billed. Prompts are random tokens, so that no cache of prefixes helps; answers have the asked
    length. Ctrl-C prints what was measured so far. Exit status 1 if a request failed.
    """
    options = {"duration": duration, "rate": rate, "at-once": at_once, "every": every, "wait": wait, "trace": trace}
    check_options(scenario, {name: value for name, value in options.items() if value is not None})
    seconds, num_requests = bounds_of(scenario, duration, requests)
    lengths = (prompt or 0, answer or 0) if trace else (prompt or _PROMPT, answer or _ANSWER)
    load = Workload(scenario, seconds, num_requests, *lengths, num_shared=shared_prefix, seed=seed, trace=trace)
    chosen: dict[str, Any] = {"rate": rate, "at_once": at_once, "every_s": every, "wait_s": wait}
    load = replace(load, **{name: value for name, value in chosen.items() if value is not None})
    check_number(load)
    access = tenant_access(home, url, key, model)
    access.require_tenant("a load, whose requests are billed,")
    _check_folder(output)
    result, error = _measured(
        access, _admin_access(access, admin_key), model, load, read_targets(target), device_price, warm_up
    )
    _print(result, as_json, output)
    if error is not None:
        raise error
    if not result.is_complete:
        raise typer.Exit(128 + signal.SIGINT)
    if result.figures.num_failed:
        raise typer.Exit(1)


def check_options(scenario: Scenario, given: dict[str, Any]) -> None:
    """Raises ``CliError`` for an option that the scenario does not use, or for the one that it lacks."""
    for name in given:
        if scenario not in _USED_BY[name]:
            users = f"--scenario {' or '.join(_USED_BY[name])}"
            raise CliError(f"--{name} has no effect with --scenario {scenario}", f"leave it out, or use {users}")
    if scenario == Scenario.TRACE and "trace" not in given:
        raise CliError("--scenario trace needs --trace", "give a CSV file: --trace arrivals.csv")


def check_number(load: Workload) -> None:
    """Raises ``CliError`` for a load whose requests are too many to be prepared."""
    if load.seconds is None or load.num_requests is not None:
        return
    options = {Scenario.SERVER: ("--rate", load.rate), Scenario.BURST: ("--at-once", load.at_once / load.every_s)}
    option, per_s = options.get(load.scenario, ("", 0.0))
    if per_s * load.seconds > _MAX_REQUESTS:
        message = f"{option} and --duration give more than {_MAX_REQUESTS:,} requests"
        raise CliError(message, f"lower {option} or --duration, or set --requests")


def check_lengths(arrivals: list[Arrival], num_shared: int, context: int) -> None:
    """Raises ``CliError`` for requests that the model cannot answer, or that are shorter than their shared prefix."""
    if not arrivals:
        raise CliError("no request is due in the load", "take more with --duration or --requests")
    longest = max(arrivals, key=lambda each: each.num_prompt_tokens + each.num_output_tokens)
    if longest.num_prompt_tokens + longest.num_output_tokens > context:
        lengths = f"a prompt of {longest.num_prompt_tokens:,} and an answer of {longest.num_output_tokens:,} tokens"
        raise CliError(f"{lengths} exceed the model's context of {context:,}", "lower --prompt and --answer")
    if num_shared > (shortest := min(each.num_prompt_tokens for each in arrivals)):
        raise CliError(f"--shared-prefix {num_shared} exceeds a prompt of {shortest}", "lower it, or raise --prompt")


def _measured(
    access: Access,
    admin: Access | None,
    name: str,
    load: Workload,
    targets: Targets,
    device_price: float | None,
    has_warm_up: bool,
) -> tuple[Result, CliError | None]:
    """Runs the load, and says why it ended before its time. Raises ``CliError``, also if no request has ended."""
    from torchrelay.cli.bench.bodies import Prompts
    from torchrelay.cli.bench.devices import DeviceWatch
    from torchrelay.cli.bench.load_client import LoadClient
    from torchrelay.cli.bench.measurement import Measurement
    from torchrelay.common.process.descriptors import raise_descriptor_limit

    with access.client() as client, (admin or access).client() as explainer:
        model = client.call("GET", f"/v1/models/{quote(name)}")
        if "generate" not in model["tasks"]:
            raise CliError(f"{model['id']} gives no tokens", "choose a model of text: torchrelay models")
        arrivals = _arrivals(load, model)
        _check_zero(load, model, admin)
        price = current_price(client.call("GET", "/v1/prices")["data"], model["id"], datetime.now(UTC))
        raise_descriptor_limit()
        load_client = LoadClient(access, name, Prompts(model["vocab_size"], load.num_shared))
        base = client.call("GET", f"/v1/models/{quote(model['root'])}")  # an adapter runs on instances of its base
        watch = DeviceWatch(explainer, base["version"], lambda: load_client.now_s) if admin else None
        if watch is not None:
            _check_admin(watch)
        measurement = Measurement(load_client, load, arrivals, watch)
        is_complete = measurement.run(has_warm_up)
        result = _result(measurement, is_complete, explainer, model["id"], price, targets, device_price)
        return result, measurement.error


def _check_admin(watch: DeviceWatch) -> None:
    """Raises ``CliError`` for a key that may not see the cluster, before the load begins."""
    try:
        watch.sample()
    except ApiError as error:
        raise CliError(f"--admin-key: {error.message}", "give a valid admin key, or leave it out") from error


def _arrivals(load: Workload, model: dict[str, Any]) -> list[Arrival]:
    """The arrivals of an open load; checks the lengths of any. Raises ``CliError``."""
    from torchrelay.cli.bench.arrivals import OPEN, arrivals_of
    from torchrelay.sim.traces import COLUMNS, Arrival

    try:
        arrivals = arrivals_of(load) if load.scenario in OPEN else []
    except ValueError as error:
        raise CliError(f"--trace: {error}", f"a trace is a CSV file with the header {','.join(COLUMNS)}") from error
    is_open = load.scenario in OPEN
    check_lengths(
        arrivals if is_open else [Arrival(0.0, load.num_prompt, load.num_answer)],
        load.num_shared,
        model["context_length"],
    )
    return arrivals


def _check_zero(load: Workload, model: dict[str, Any], admin: Access | None) -> None:
    """Raises ``CliError`` if the scenario cold cannot see the model at zero, or the model never is."""
    if load.scenario != Scenario.COLD:
        return
    if admin is None:
        raise CliError("--scenario cold needs the admin key, to see the model at zero", "pass it with --admin-key")
    if model["min_instances"]:
        hint = f"torchrelay models set {model['id']} --min-instances 0"
        raise CliError(f"{model['id']} is never at zero: min_instances is {model['min_instances']}", hint)
    if model["schedule"]:
        hint = f"torchrelay models set {model['id']} --schedule none"
        raise CliError(f"{model['id']} has a schedule, which may keep it loaded", hint)


def _result(
    measurement: Measurement,
    is_complete: bool,
    explainer: GatewayClient,
    model: str,
    price: dict[str, Any],
    targets: Targets,
    device_price: float | None,
) -> Result:
    from torchrelay.cli.bench.cold_starts import explained
    from torchrelay.cli.bench.figures import bill_dollars, cold_of, figures_of
    from torchrelay.cli.bench.measurement import held_by
    from torchrelay.cli.bench.report import Result

    answered = measurement.client.answered
    if not answered:
        raise CliError("interrupted before a request had ended", "nothing was measured")
    figures = figures_of(answered, targets)
    return Result(
        model,
        measurement.load,
        targets,
        figures,
        held_by(measurement.watch, figures) if measurement.watch else None,
        cold_of(explained(explainer, answered)),
        bill_dollars(figures, price),
        device_price,
        is_complete,
    )


def _admin_access(access: Access, admin_key: str | None) -> Access | None:
    """The same gateway with the admin key, if there is one: a local platform's is never sent elsewhere."""
    if not admin_key and access.home is not None:
        admin_key = access.home.admin_key()
    if not admin_key:
        return None
    admin = replace(access, key=clean_key(admin_key))
    if not admin.is_admin:
        raise CliError("--admin-key is a tenant's key", "give the admin key, or leave it out: devices are not measured")
    return admin


def _check_folder(output: Path | None) -> None:
    if output is not None and not os.access(output.resolve().parent, os.W_OK):
        raise CliError(f"--output: {output.parent} is not a folder that can be written", "choose another file")


def _print(result: Result, as_json: bool, output: Path | None) -> None:
    from torchrelay.cli.bench.report import result_json, result_view

    figures = result_json(result)
    if output is not None:
        output.write_text(json.dumps(figures, indent=2) + "\n")
    if as_json:
        console.print_json(figures)
    else:
        console.out().print(result_view(result))
