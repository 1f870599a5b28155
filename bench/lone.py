"""A tenant's single requests beside a tenant that floods the platform: how long they take.

    python bench/lone.py [--quick]

First case, more models than slots: `torchrelay up` runs two workers that play both roles. A tenant keeps three models
busy, each with 40 callers of answers of 500 tokens; another tenant sends single short requests, one after another, to
its own model, after pauses in which it may lose its slot. Second case, the same model: both tenants have uploaded
identical files, so they share a pack and its instances. A tenant keeps 1,300 calls in progress over one gRPC
connection, and another sends ten single requests. Third case, the same over six connections, which carry all 1,300
calls at once, most of them to be refused and sent again: another tenant makes ten single calls of gRPC.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check, finish, parser_of, progress
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import Platform, running_platform
from torchrelay.inference.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
NUM_FLOODED, NUM_CALLERS, NUM_TOKENS = 3, 40, 500
NUM_CALLS, CALL_TOKENS = 1300, 32
NUM_CONNECTIONS = 6  # that carry as many calls
LONE_TOKENS = 8
LEAD_S = 3.0  # the flood's lead before the first single request
# Too many waiting, too many streams; and a refusal of which grpcio's client has lost the cause, while it still sent.
REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
PROMPT = list(range(20, 52))
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True, slots=True)
class Form:
    """Pauses before the single requests of the first case, and the number of those of each other case."""

    pauses_s: tuple[float, ...]
    num_same: int


FULL, QUICK = Form((8.0, 2.0, 13.0, 5.0, 11.0, 1.0, 17.0, 12.0), 10), Form((8.0, 2.0), 4)


def request_of(model: str, seed: int, num_tokens: int) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.TokenIds(ids=[(seed + each) % 250 for each in PROMPT])
    return inference_pb2.GenerateRequest(
        model=model, prompt_token_ids=prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True
    )


async def keep_calling(address: str, key: str, calls: dict[str, int], num_tokens: int, num_connections: int) -> None:
    """Keeps ``calls`` of each model in progress over so many connections, until cancelled, and prints a line for each
    event and each refusal. A refused call is sent again after a second.
    """
    metadata = (("authorization", f"Bearer {key}"),)
    async with AsyncExitStack() as stack:
        stubs = []
        for _ in range(num_connections):
            channel = grpc.aio.insecure_channel(address, OWN_CONNECTION)
            stubs.append(inference_pb2_grpc.InferenceStub(await stack.enter_async_context(channel)))
        callers = await stack.enter_async_context(asyncio.TaskGroup())

        async def call_on(model: str, seed: int) -> None:
            stub, request = stubs[seed % num_connections], request_of(model, seed, num_tokens)
            while True:
                try:
                    async for _ in stub.Generate(request, metadata=metadata):
                        print("event", flush=True)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in REFUSED:
                        raise
                    print("refused", flush=True)
                    await asyncio.sleep(1.0)

        for model, number in calls.items():
            for seed in range(number):
                callers.create_task(call_on(model, seed))


@contextmanager
def flood(
    platform: Platform, key: str, calls: dict[str, int], num_tokens: int, num_connections: int = 1
) -> Iterator[None]:
    """A process that keeps the calls in progress; it has its first token when this begins."""
    numbers = str(num_tokens), str(num_connections)
    arguments = [platform.endpoints["grpc"], key, *numbers, *(f"{name}={n}" for name, n in calls.items())]
    command = [sys.executable, "-m", "bench.lone", "--flood", *arguments]
    with tempfile.TemporaryFile("w+") as lines, subprocess.Popen(command, cwd=ROOT, stdout=lines) as process:
        try:
            while os.fstat(lines.fileno()).st_size == 0 and process.poll() is None:
                time.sleep(0.05)
            time.sleep(LEAD_S)
            yield
            assert process.poll() is None, "the flood has ended"
        finally:
            process.kill()
            process.wait()
            lines.seek(0)
            kinds = Counter(map(str.strip, lines))
            progress(f"the flood: {kinds['event']} events, {kinds['refused']} refused calls")


def single(platform: Platform, key: str, model: str) -> float:
    """Seconds that a single short request takes."""
    begin = time.monotonic()
    complete(platform, key, model, PROMPT, max_tokens=LONE_TOKENS, ignore_eos=True)
    return time.monotonic() - begin


def single_call(platform: Platform, key: str, model: str) -> float:
    """Seconds that a single short call takes, over a connection of its own, with the time to open it."""
    begin = time.monotonic()
    with grpc.insecure_channel(platform.endpoints["grpc"], OWN_CONNECTION) as channel:
        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        metadata = (("authorization", f"Bearer {key}"),)
        assert list(generate(request_of(model, 0, LONE_TOKENS), metadata=metadata))[-1].usage.completion_tokens
    return time.monotonic() - begin


def beside_more_models(
    platform: Platform, crowd: str, lone: str, folder: Path, form: Form
) -> tuple[list[float], float]:
    """Seconds of each single request to a tenant's model, and of a load on the idle platform."""
    names = []
    for number in range(NUM_FLOODED):
        checkpoint = make_checkpoint(folder / f"model-{number}", "llama", seed=number, **LLAMA_33MB)
        names.append(platform.upload(crowd, checkpoint, f"model-{number}"))
    own = platform.upload(lone, make_checkpoint(folder / "own", "llama", seed=99, **LLAMA_33MB), "own")
    load_s = single(platform, lone, own)
    took_s = []
    with flood(platform, crowd, dict.fromkeys(names, NUM_CALLERS), NUM_TOKENS):
        for pause_s in form.pauses_s:
            time.sleep(pause_s)
            took_s.append(single(platform, lone, own))
            progress(f"more models than slots: {took_s[-1]:.2f} s")
    return took_s, load_s


def beside_same_model(
    platform: Platform, crowd: str, lone: str, folder: Path, form: Form
) -> tuple[list[float], list[float]]:
    """Seconds of each single request, and of each call of gRPC, to a model with the same files as the flooded model."""
    checkpoint = make_checkpoint(folder / "same", "llama", seed=7, **LLAMA_33MB)
    flooded, own = (platform.upload(key, checkpoint, "same") for key in (crowd, lone))
    single(platform, lone, own)
    took_s: list[list[float]] = []
    for ask, num_connections in ((single, 1), (single_call, NUM_CONNECTIONS)):
        took_s.append([])
        with flood(platform, crowd, {flooded: NUM_CALLS}, CALL_TOKENS, num_connections):
            for _ in range(form.num_same):
                took_s[-1].append(ask(platform, lone, own))
                progress(f"same model, {num_connections} connections: {took_s[-1][-1]:.2f} s")
    return took_s[0], took_s[1]


def main() -> None:
    if sys.argv[1:2] == ["--flood"]:
        address, key, num_tokens, num_connections, *calls = sys.argv[2:]
        numbers = {name: int(number) for name, _, number in (call.rpartition("=") for call in calls)}
        asyncio.run(keep_calling(address, key, numbers, int(num_tokens), int(num_connections)))
        return
    parser = parser_of(__doc__, "two single requests, and four in each other case, under 50 s")
    form = QUICK if parser.parse_args().quick else FULL
    options = (
        *("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "2"),
        *("--arena-mb", "512", "--threads", "1", "--quiet"),
    )
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        folder = Path(name)
        with running_platform(folder / "home", options) as platform:
            crowd, lone = platform.tenant("crowd"), platform.tenant("lone")
            took_s, load_s = beside_more_models(platform, crowd, lone, folder, form)
            same_s, call_s = beside_same_model(platform, crowd, lone, folder, form)
    over_load = [each - load_s for each in took_s]
    note = f"{len(took_s)} requests, mean {mean(took_s):.2f} s; a load on the idle platform: {load_s:.2f} s"
    conditions = {
        "flooded_models": NUM_FLOODED,
        "callers_per_model": NUM_CALLERS,
        "answer_tokens": NUM_TOKENS,
        "calls_of_same_model": NUM_CALLS,
    }
    checks = [
        Check("lone_over_load_s", max(over_load), "s", 5.0, note),
        Check("lone_mean_s", mean(took_s), "s"),
        Check("lone_same_model_s", max(same_s), "s", 3.0, f"{len(same_s)} requests, mean {mean(same_s):.2f} s"),
        Check("lone_grpc_call_s", max(call_s), "s", 5.0, f"{len(call_s)} calls, mean {mean(call_s):.2f} s"),
    ]
    finish("lone", conditions, checks)


if __name__ == "__main__":
    main()
