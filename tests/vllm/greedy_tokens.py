"""``python -m tests.vllm.greedy_tokens FOLDER PROMPTS NUM``: what vLLM alone answers with a folder, as JSON lists."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torchrelay.vllm.engine import VllmEngine  # which sets what vLLM reads when it is imported


def main(folder: str, prompts: str, num_tokens: str) -> None:
    from vllm import LLM, SamplingParams

    assert VllmEngine.capabilities.engine == "vllm"
    dtype = json.loads(Path(folder, "config.json").read_text())["dtype"]  # by itself vLLM computes fp32 in bf16
    llm = LLM(
        folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        language_model_only=True,  # of a model that takes images too
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=8 << 20,
    )
    greedy = SamplingParams(temperature=0, max_tokens=int(num_tokens), ignore_eos=True, detokenize=False)
    answers = [
        list(llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in json.loads(prompts)
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
