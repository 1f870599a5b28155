"""Compares the platform's greedy answers of SmolLM2 with transformers', token by token.

    python -m examples.smollm2.check [GGUF]

GGUF is the file that download.py wrote; it is converted as an upload converts it. Starts platforms of its own and
compares (a) answers of a cold start, (b) a stream whose decode worker is killed, (c) a stream that a drain cuts off,
and (d) answers whose prompts are computed by one worker and continued by another. Weights and computations of these
are fp32: in bf16 the best two tokens often have the same logit, and then either is right. So (e) of the weights as they
are uploaded, computed in bf16, each token must have the highest of transformers' fp32 logits for the answer before it,
or one that rounding to bf16 may make equal to it. The exit status is 1 if an answer differs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from examples.smollm2.download import FOLDER, GGUF
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.api.model_source import Folder
from torchrelay.cli.api.upload import ModelUpload
from torchrelay.cli.gguf.conversion import plan_conversion
from torchrelay.cli.home import Home
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller
from torchrelay.common.net.rpc.channels import open_blocking_channel
from torchrelay.control.v1.scheduler_pb2 import ClusterView, InstanceView, WatchClusterRequest
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.control.v1.types_pb2 import ROLE_DECODE, ROLE_PREFILL, ModelVersion
from torchrelay.control.v1.worker_pb2 import LoadRequest, UnloadRequest
from torchrelay.control.v1.worker_pb2_grpc import WorkerStub

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List five prime numbers and say why each is prime.",
)
NUM_TOKENS, NUM_BEFORE_FAULT = 64, 12
LIMIT_S = 120
MAX_STEPS = 2  # of bf16 at the highest logit: the best and the chosen logit are each rounded, by up to one
UP = ("--arena-mb", "1024", "--threads", "1", "--idle-timeout-s", "600", "--quiet")


@dataclass(frozen=True, slots=True)
class Answer:
    request_id: str
    token_ids: list[int]


class Reference:
    """The model in transformers, computed in fp32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        token_ids: list[int] = rendered["input_ids"]
        return token_ids

    @torch.no_grad()
    def answer(self, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        token_ids: list[int] = self.model.generate(ids, **options)[0, len(prompt) :].tolist()
        return token_ids

    @torch.no_grad()
    def steps_below_best(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """The steps of bf16 by which each token's logit is below the highest, given the tokens before it."""
        logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
        best = logits.max(dim=-1).values
        gaps = best - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        steps: list[float] = (gaps / 2.0 ** (best.abs().log2().floor() - 7)).tolist()
        return steps

    def save(self, folder: Path) -> None:
        """Writes the model in fp32, which holds bf16 weights exactly."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Platform:
    """A running platform that serves the model."""

    home: Home
    client: GatewayClient
    url: str
    key: str
    model: str

    def stream(self, prompt: Sequence[int]) -> Iterator[Answer]:
        """A greedy completion: yields the answer so far, after every event."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = Answer("", [])
        headers = {"Authorization": f"Bearer {self.key}"}
        with httpx.stream("POST", self.url, json=body, headers=headers, timeout=LIMIT_S, trust_env=False) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise SystemExit(f"the stream failed: {event['error']}")
                    added = [token_id for choice in event["choices"] for token_id in choice.get("token_ids") or ()]
                    answer = Answer(event["id"], answer.token_ids + added)
                    yield answer

    def answer(self, prompt: Sequence[int]) -> Answer:
        *_, answer = self.stream(prompt)
        return answer

    def explain(self, answer: Answer) -> dict[str, Any]:
        explained: dict[str, Any] = self.client.call("GET", f"/v1/requests/{answer.request_id}/explain")
        return explained

    def views(self) -> Iterator[ClusterView]:
        """The scheduler's view, at once and after every change."""
        address, token = self.home.endpoints()["scheduler"], self.home.call_token(SCHEDULER_NODE, Caller.CLI)
        with open_blocking_channel(address, token=token) as channel:
            yield from SchedulerStub(channel).WatchCluster(WatchClusterRequest())

    @contextmanager
    def worker(self, worker_id: str, address: str) -> Iterator[WorkerStub]:
        with open_blocking_channel(address, token=self.home.call_token(worker_id, *Caller)) as channel:
            yield WorkerStub(channel)

    def kill(self, child: str) -> None:
        os.kill(json.loads((self.home.run / f"{child}.json").read_text())["pid"], signal.SIGKILL)

    def load_on_other_worker(self) -> None:
        """Loads the model on the worker that lacks it, as a scheduler does."""
        view = next(self.views())
        worker = next(worker for worker in view.workers if not worker.slot.instance_id)
        (version,) = view.versions
        named = ModelVersion(version_id=version.version_id, model=self.model, pack_id=version.pack_id)
        roles = [ROLE_PREFILL, ROLE_DECODE]
        with self.worker(worker.worker_id, worker.grpc_address) as stub:
            request = LoadRequest(epoch=view.epoch, instance_id="i-2", version=named, roles=roles)
            stub.Load(request, timeout=LIMIT_S)
        next(view for view in self.views() if [instance.state for instance in view.instances] == ["ready"] * 2)

    def drain(self) -> None:
        """Unloads the instance that computes the running answer, which is cut off."""
        view = next(view for view in self.views() if _running(view))
        (instance,) = _running(view)
        address = next(worker.grpc_address for worker in view.workers if worker.worker_id == instance.worker_id)
        with self.worker(instance.worker_id, address) as stub:
            request = UnloadRequest(epoch=view.epoch, instance_id=instance.instance_id, drain_s=0)
            stub.Unload(request, timeout=LIMIT_S)


def _running(view: ClusterView) -> list[InstanceView]:
    return [instance for instance in view.instances if instance.num_running]


@contextmanager
def platform(folder: Path, *options: str) -> Iterator[Platform]:
    """Runs `torchrelay up` and publishes the model of ``folder``."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-smollm2-") as name:
        home, log = Home(Path(name) / "home"), Path(name) / "up.log"
        command = [str(Path(sys.executable).parent / "torchrelay"), "up", "--home", str(home.path), *UP, *options]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            while not home.endpoints_file.exists():
                if process.poll() is not None:
                    raise SystemExit(f"torchrelay up ended with status {process.returncode}:\n{log.read_text()}")
                time.sleep(0.05)
            url = home.endpoints()["http"]
            with GatewayClient(url, home.admin_key()) as admin:
                admin.call("POST", "/v1/tenants", json={"name": "acme"})
                key = admin.call("POST", "/v1/keys", json={"tenant": "acme", "name": "check"})["key"]
                with GatewayClient(url, key) as client:
                    model = ModelUpload(client, Folder(folder), "smollm2", lambda *_: None).run({})["id"]
                yield Platform(home, admin, f"{url}/v1/completions", key, model)
        finally:
            process.terminate()
            process.wait(60)


class Comparison:
    """Prints what was compared and counts differences."""

    def __init__(self, reference: Reference) -> None:
        self.prompts = [reference.prompt(question) for question in QUESTIONS]
        self._expected = [reference.answer(prompt) for prompt in self.prompts]
        self.num_different = 0

    def check(self, what: str, number: int, answer: Answer, proof: bool) -> None:
        """``proof``: whether the explanation of the request shows that it was computed in the way that is checked."""
        pairs = zip(answer.token_ids, self._expected[number], strict=False)
        num_equal = next((index for index, (own, other) in enumerate(pairs) if own != other), len(answer.token_ids))
        is_equal = answer.token_ids == self._expected[number] and proof
        self.num_different += not is_equal
        note = "" if proof else "; the request was NOT computed in this way"
        print(f"  {'equal' if is_equal else 'DIFFERENT'}  {num_equal} of {NUM_TOKENS} tokens  {what}{note}", flush=True)

    def check_steps(self, what: str, steps: Sequence[float]) -> None:
        is_right = len(steps) == NUM_TOKENS and max(steps) <= MAX_STEPS
        self.num_different += not is_right
        others = f", the others within {max(steps):.1f} steps of bf16" if any(steps) else ""
        print(f"  {'right' if is_right else 'WRONG'}  {steps.count(0)} of {NUM_TOKENS} tokens best{others}  {what}")


def check_roles_and_kill(folder: Path, comparison: Comparison) -> None:
    with platform(folder) as running:
        for number, prompt in enumerate(comparison.prompts):
            answer = running.answer(prompt)
            explained = running.explain(answer)
            reasons = [decision["reason"] for decision in explained["decisions"] if decision["kind"] == "place"]
            apart = any("prefill on prefill-0, decode on decode-0" in reason for reason in reasons)
            loaded = any(phase["name"] == "last_layer" for phase in explained["phases"])
            if number == 0:
                comparison.check(f"(a) cold start: {QUESTIONS[number]}", number, answer, loaded)
            comparison.check(f"(d) prefill-0, then decode-0: {QUESTIONS[number]}", number, answer, apart)
        killed = False
        for answer in running.stream(comparison.prompts[1]):
            if not killed and len(answer.token_ids) >= NUM_BEFORE_FAULT:
                running.kill("decode-0")
                killed, num_seen = True, len(answer.token_ids)
        places = [decision for decision in running.explain(answer)["decisions"] if decision["kind"] == "place"]
        comparison.check(f"(b) decode-0 killed after {num_seen} tokens: {QUESTIONS[1]}", 1, answer, len(places) > 1)


def check_drain(folder: Path, comparison: Comparison) -> None:
    with platform(folder, "--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "2") as running:
        comparison.check(f"(a) cold start: {QUESTIONS[0]}", 0, running.answer(comparison.prompts[0]), True)
        running.load_on_other_worker()
        drained = False
        for answer in running.stream(comparison.prompts[3]):
            if not drained and len(answer.token_ids) >= NUM_BEFORE_FAULT:
                running.drain()
                drained, num_seen = True, len(answer.token_ids)
        places = [decision for decision in running.explain(answer)["decisions"] if decision["kind"] == "place"]
        comparison.check(f"(c) cut off after {num_seen} tokens: {QUESTIONS[3]}", 3, answer, len(places) > 1)


def check_bf16(folder: Path, reference: Reference, comparison: Comparison) -> None:
    with platform(folder) as running:
        for number, prompt in enumerate(comparison.prompts):
            steps = reference.steps_below_best(prompt, running.answer(prompt).token_ids)
            comparison.check_steps(f"(e) bf16: {QUESTIONS[number]}", steps)


def main() -> None:
    gguf = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / GGUF
    if not gguf.is_file():
        raise SystemExit(f"{gguf} does not exist; make it with: python examples/smollm2/download.py")
    with tempfile.TemporaryDirectory(prefix="torchrelay-smollm2-") as name:
        folder, widened = Path(name) / "bf16", Path(name) / "fp32"
        folder.mkdir()
        plan_conversion(gguf).write(folder, lambda *_: None)
        reference = Reference(folder)
        reference.save(widened)
        comparison = Comparison(reference)
        print("A platform with a worker for prefill and one for decode:")
        check_roles_and_kill(widened, comparison)
        print("A platform with two workers for both:")
        check_drain(widened, comparison)
        print("A platform with the weights as they are uploaded:")
        check_bf16(folder, reference, comparison)
    print(f"{comparison.num_different} differences")
    sys.exit(comparison.num_different > 0)


if __name__ == "__main__":
    main()
