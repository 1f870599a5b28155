"""Batches of completions that benches begin."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torchrelay.cli.api.client import GatewayClient


def begin_batch(client: GatewayClient, bodies: Iterable[Mapping[str, Any]]) -> str:
    """Begins a batch with a line per body, named ``line-0`` and so on, and returns its id."""
    lines = [
        json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(lines).encode()
    file = client.call("POST", "/v1/files", files={"file": ("input.jsonl", content)}, data={"purpose": "batch"})
    order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id: str = client.call("POST", "/v1/batches", json=order)["id"]
    return batch_id
