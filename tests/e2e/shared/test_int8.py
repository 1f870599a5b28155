"""A model uploaded with --quantize int8 answers as its int8 weights do, and is billed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.e2e.tenants import Tenant
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete, headers
from tests.support.http import http
from tests.support.int8_checkpoints import dequantized_checkpoint, int8_checkpoint
from tests.support.platform import SCRIPTS, Platform
from tests.unit.engine.harness import Model, prompt_of

pytestmark = pytest.mark.e2e


def test_quantized_upload_answers_and_is_billed(platform: Platform, tenant: Tenant, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "llama", hidden_size=128, intermediate_size=512)
    access = ("--url", platform.http, "--key", tenant.key)
    for name, options in (("whole", ()), ("small", ("--quantize", "int8"))):
        command = [SCRIPTS / "torchrelay", "upload", source, "--name", name, *options, *access]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    whole, small = (
        http.get(f"{platform.http}/v1/models/{tenant.name}/{name}", headers=headers(tenant.key)).json()
        for name in ("whole", "small")
    )
    assert (whole["dtype"], small["dtype"]) == ("F32", "I8")
    assert small["size_bytes"] < 0.5 * whole["size_bytes"]

    prompt = list(prompt_of(20))
    reply = complete(platform, tenant.key, small["id"], prompt, max_tokens=12)
    reference = Model(dequantized_checkpoint(source, int8_checkpoint(source), torch.float32))
    assert reply["choices"][0]["token_ids"] == reference.expected(prompt, 12)
    usage = http.get(f"{platform.http}/v1/usage?group_by=model", headers=headers(tenant.key)).json()
    billed = next(row for row in usage["data"] if row["model"] == small["id"])
    assert (billed["prompt_tokens"], billed["completion_tokens"]) == (20, 12)
