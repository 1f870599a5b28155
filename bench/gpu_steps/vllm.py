"""vLLM in a slot of a worker: its tokens are our engine's, and each model finds the memory that the last one freed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.device import engine
from bench.device.packs import pack_of_checkpoint
from bench.gpu_steps.machine import used_mb
from bench.gpu_steps.step import Setup, at_most, figure, on_gpu
from bench.report import Check
from tests.integration.roles_testbed import DECODE, PREFILL, RolesTestbed, model_version, running_test_worker
from tests.support.brokers import nats_server
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_checkpoints import quantized_checkpoint
from tests.unit.param_store.running_store import REMOTE, publish, running_store
from torchrelay.engine.kv.pool import KvPool

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 16
PROMPTS = [list(engine.prompt_of(length)) for length in (1, 33, 64)]
QUANTIZED = {"awq": "float16", "gptq": "float16", "fp8-channels": "bfloat16"}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
DIGITS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "grammar": "start: /[0-9]{8}/"}


def vllm(setup: Setup, served_by: str = "vllm") -> Iterator[Check]:
    """``served_by``: the engine of the slot; with another one than vLLM without quantized models."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        folder = Path(name)
        models = {
            f"dense_{seed}": make_checkpoint(folder / f"{seed}", "llama", head_dim=32, seed=seed) for seed in (0, 1)
        }
        expected = {model: _own_answers(setup, checkpoint) for model, checkpoint in models.items()}
        if served_by == "vllm":
            runner = float(os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0"))
            yield figure("vllm_v2_runner", runner, "", f"vLLM {version('vllm')}")
            for form, dtype in QUANTIZED.items():
                model = form.partition("-")[0]
                models[model], _ = quantized_checkpoint(folder / form, form, dtype=dtype)
                expected[model] = _answers_of_vllm_alone(models[model])
        with nats_server(folder) as url:
            yield from asyncio.run(_served(setup, folder, url, served_by, models, expected))


def _own_answers(setup: Setup, checkpoint: Path) -> list[list[int]]:
    pool = KvPool(8 << 20, str(setup.device))
    instance = engine.instance_of(pack_of_checkpoint(checkpoint), pool, attention=setup.attention)
    answers = [engine.greedy(instance, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]
    instance.close()
    return answers


def _answers_of_vllm_alone(checkpoint: Path) -> list[list[int]]:
    arguments = str(checkpoint), json.dumps(PROMPTS), str(NUM_TOKENS)
    command = [sys.executable, "-m", "tests.vllm.greedy_tokens", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


async def _served(
    setup: Setup, folder: Path, url: str, served_by: str, models: dict[str, Path], expected: dict[str, list[list[int]]]
) -> list[Check]:
    """The figures of each model, loaded into the same slot one after the other."""
    checks: list[Check] = []
    settings: dict[str, Any] = {"engine": served_by, "device": str(setup.device), "kv_pool_bytes": 8 << 20}
    async with running_store(folder / "store") as store, running_test_worker(url, store, **settings) as worker:
        start_mb = used_mb(setup)
        for model, checkpoint in models.items():
            description = await publish(store, checkpoint)
            await store.fetch(description.pack_id, REMOTE)
            scene, begin_s = RolesTestbed(worker, worker, model_version(description)), time.monotonic()
            await worker.load(scene.version, [PREFILL, DECODE])
            await worker.until_ready()
            checks.append(figure(f"vllm_{model}_load_s", time.monotonic() - begin_s, "s", "from the arena"))
            scene.streams = await scene.connect(f"gw-{model}")
            answers = [await _answer(scene, prompt, temperature=0.0) for prompt in PROMPTS]
            wrong = sum(answer != right for answer, right in zip(answers, expected[model], strict=True))
            peer = "our engine, fp32" if model.startswith("dense") else "vLLM with its own loader"
            checks.append(at_most(0, figure(f"vllm_{model}_mismatches", wrong, "prompts", peer)))
            if model == "dense_0":
                seeded = [await _answer(scene, PROMPTS[1], **SEEDED) for _ in range(2)]
                digits = await _answer(scene, PROMPTS[1], **DIGITS)
                checks.append(at_most(0, figure("vllm_seed_mismatches", int(seeded[0] != seeded[1]), "prompts")))
                checks.append(at_most(0, figure("vllm_grammar_mismatches", abs(len(digits) - 8), "tokens", "8 digits")))
            await worker.unload()
            await worker.until_free()
        growth = figure("vllm_growth_mb", used_mb(setup) - start_mb, "MB", f"after {len(models)} models in the slot")
        checks.append(on_gpu(setup, at_most(200, growth)))
    return checks


async def _answer(scene: RolesTestbed, prompt: Sequence[int], **sampling: Any) -> list[int]:
    request = await scene.send(scene.request(prompt, max_tokens=NUM_TOKENS, **sampling))
    await request.finished()
    return request.tokens()
