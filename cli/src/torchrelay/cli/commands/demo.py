"""`torchrelay demo`: a tour of the platform, from the upload of a model to the bill."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import grpc
import typer
from rich.console import Console
from rich.table import Table

from torchrelay.cli.api.chat_stream import Answer, stream_chat
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_source import Folder
from torchrelay.cli.api.upload import ModelUpload
from torchrelay.cli.home import Home
from torchrelay.cli.views.timeline import explanation
from torchrelay.inference.v1 import inference_pb2, inference_pb2_grpc

MODEL_FOLDER = Path(__file__).parents[1] / "demo_model"  # examples/glossary trains it
IDLE_S = 3.0
QUESTIONS = ("What is a cold start?", "Explain the relay.", "What does the param-store do?")
console = Console(highlight=False)


@contextmanager
def platform(home: Home) -> Iterator[dict[str, str]]:
    """Runs `torchrelay up` on a new home; yields its endpoints, and stops it with SIGINT, as a user would."""
    program = shutil.which("torchrelay", path=sysconfig.get_path("scripts")) or "torchrelay"
    command = [program, "up", "--home", str(home.path), "--idle-timeout-s", str(IDLE_S), "--quiet"]
    # Blocked here until the child can be stopped, and in the child until it can stop in order.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = subprocess.Popen(command, start_new_session=True)  # Ctrl-C reaches it once, through us
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while not home.endpoints_file.exists():
            if process.poll() is not None:
                raise SystemExit(f"torchrelay up ended with status {process.returncode}")
            time.sleep(0.05)
        yield home.endpoints()
    except KeyboardInterrupt:
        console.print("\nstopping ... [dim](press Ctrl-C again to kill)[/]")
        raise
    finally:
        status = stop(process)
    if status:
        raise SystemExit(f"torchrelay up ended with status {status}")


def stop(process: subprocess.Popen[bytes]) -> int:
    """Stops the platform as Ctrl-C does and returns its exit status; another Ctrl-C kills it."""
    try:
        for _ in range(2):  # the second signal kills the platform's processes
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(20)
        process.kill()
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        raise


def step(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/bold cyan]")


def ask_rest(client: GatewayClient, model: str, question: str) -> str:
    """Streams one answer; returns the request id."""
    console.print(f"[bold]{question}[/bold]\n  ", end="")
    answer = Answer(time.perf_counter)
    with closing(stream_chat(client, model, [{"role": "user", "content": question}], {"temperature": 0})) as events:
        for event in events:
            answer.add(event)
            console.print(event.text, end="")
    console.print(f"\n  [dim]{answer.summary()}[/dim]")
    return answer.request_id


def ask_grpc(address: str, key: str, model: str, question: str) -> None:
    # A proxy of the environment does not reach this machine.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        chat = inference_pb2.Messages(messages=[inference_pb2.Message(role="user", content=question)])
        request = inference_pb2.GenerateRequest(model=model, chat=chat, temperature=0)
        console.print(f"[bold]{question}[/bold]  [dim](gRPC)[/dim]\n  ", end="")
        for event in stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),)):
            for choice in event.choices:
                console.print(choice.text, end="")
        console.print()


def wait_for_zero(admin: GatewayClient) -> float:
    """Waits until no worker holds a model; returns the seconds of waiting."""
    begin = time.monotonic()
    while admin.call("GET", "/v1/cluster")["instances"]:
        time.sleep(0.05)
    return time.monotonic() - begin


def show_timeline(client: GatewayClient, request_id: str, title: str) -> None:
    phases = client.call("GET", f"/v1/requests/{request_id}/explain")["phases"]
    console.print(f"\n  [bold]{title}[/bold]")
    console.print(explanation(phases, ()))


def show_bill(client: GatewayClient) -> None:
    bill = client.call("GET", f"/v1/invoices/{datetime.now(UTC):%Y-%m}")
    table = Table("model", "prompt tokens", "output tokens", "requests", "cost", title=f"Bill of {bill['tenant']}")
    for line in bill["lines"]:
        cost = f"{line['cost_nano'] / 1e9:.9f} {line['currency']}"
        cells = (line["model"], line["prompt_tokens"], line["completion_tokens"], line["requests"], cost)
        table.add_row(*map(str, cells))
    console.print(table)
    console.print(f"  amount due, each line rounded to cents: {bill['amount']} {bill['currency']}")


def demo() -> None:
    """Start a platform of its own, upload a model, ask it, let it sleep, wake it, and print the bill.

    Takes about 20 seconds, and leaves nothing behind.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="torchrelay-demo-") as folder:
            tour(Home(Path(folder)))
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(128 + signal.SIGINT) from None
    console.print(
        "stopped\n\nNext: `torchrelay up`, or `make up` in the repository, starts a platform that keeps running."
    )
    console.print("It prints the address of its console, and commands to try.")


def tour(home: Home) -> None:
    step("1. Start the platform: Redis (Valkey), NATS, three services and two workers")
    with platform(home) as endpoints, GatewayClient(endpoints["http"], home.admin_key()) as admin:
        step("2. Create a tenant and an API key")
        tenant = admin.call("POST", "/v1/tenants", json={"name": "acme"})
        key = admin.call("POST", "/v1/keys", json={"tenant": "acme", "name": "demo"})["key"]
        console.print(f"  tenant {tenant['name']}, key {key[:12]}...")
        with GatewayClient(endpoints["http"], key) as client:
            talk(client, admin, endpoints["grpc"], key)
        step("9. Stop the platform")


def talk(client: GatewayClient, admin: GatewayClient, grpc_address: str, key: str) -> None:
    step("3. Upload a tiny model that explains Torchrelay's terms")
    model = ModelUpload(client, Folder(MODEL_FOLDER), "glossary", lambda *_: None).run({"idle_timeout_s": IDLE_S})["id"]
    console.print(f"  published {model}")
    step("4. Ask three questions over REST; the first one has to load the model")
    first, *others = QUESTIONS
    request_id = ask_rest(client, model, first)
    show_timeline(client, request_id, "Where the time of this cold start went; the weights came from remote storage")
    for question in others:
        ask_rest(client, model, question)
    step("5. Ask a question over gRPC")
    ask_grpc(grpc_address, key, model, "What is a pack?")
    step(f"6. Without requests the model is unloaded after {IDLE_S:g} s")
    console.print(f"  unloaded after {wait_for_zero(admin):.1f} s; no worker holds the model now")
    step("7. Ask again: another cold start")
    request_id = ask_rest(client, model, "What is scale to zero?")
    show_timeline(client, request_id, "Where its time went; the weights were still in host memory")
    step("8. The bill")
    show_bill(client)
