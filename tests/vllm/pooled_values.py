"""``python -m tests.vllm.pooled_values FOLDER PROMPTS``: vLLM's own vectors for lists of tokens, as JSON lists.

With a fourth argument ``PROMPTS`` is a query and a list of documents, of which it prints the scores.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torchrelay.vllm.engine import VllmEngine  # which sets what vLLM reads when it is imported


def main(folder: str, prompts: str, is_reranker: str = "") -> None:
    from vllm import LLM

    assert VllmEngine.capabilities.engine == "vllm"
    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 8 << 20}
    llm = LLM(folder, runner="pooling", max_model_len=96 if is_reranker else 1024, **settings)
    if is_reranker:
        query, documents = json.loads(prompts)
        print(json.dumps([output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]))
        return
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in json.loads(prompts)], use_tqdm=False)
    print(json.dumps([output.outputs.embedding for output in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
