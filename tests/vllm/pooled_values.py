"""``python -m tests.vllm.pooled_values FOLDER PROMPTS``: vLLM's own vectors for lists of tokens, as JSON lists."""

from __future__ import annotations

import json
import sys
from typing import Any

from torchrelay.vllm.engine import VllmEngine  # which sets what vLLM reads when it is imported


def main(folder: str, prompts: str) -> None:
    from vllm import LLM

    assert VllmEngine.capabilities.engine == "vllm"
    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 8 << 20}
    llm = LLM(folder, runner="pooling", max_model_len=96, **settings)
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in json.loads(prompts)], use_tqdm=False)
    print(json.dumps([output.outputs.embedding for output in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
