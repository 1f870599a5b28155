"""vLLM's start from a folder in this process, timed to its first token: `python -m bench.serving.vllm_start FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

from vllm import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor


def main() -> None:
    times_s = [time.monotonic()]
    config = EngineArgs(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        generation_config="vllm",
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    ).create_engine_config()
    times_s.append(time.monotonic())
    vllm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    times_s.append(time.monotonic())
    prompt = {"prompt_token_ids": list(range(64))}
    vllm.add_request("first", prompt, SamplingParams(max_tokens=1, detokenize=False))
    while vllm.has_unfinished_requests():
        vllm.step()
    times_s.append(time.monotonic())
    names = ("config", "engine", "first token")
    print(json.dumps({name: times_s[index + 1] - times_s[index] for index, name in enumerate(names)}))


if __name__ == "__main__":
    main()
