"""`torchrelay upload OWNER/NAME`: a model of the hub is served with the files of its repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.tenants import Tenant, reference
from tests.support.completions import complete
from tests.support.hub_server import HubServer, running_hub
from tests.support.platform import SCRIPTS, Platform
from tests.unit.engine.harness import prompt_of
from torchrelay.cli.api.client import GatewayClient
from torchrelay.common.ids import new_id

pytestmark = pytest.mark.e2e
WEIGHTS = "model.safetensors"


def upload(platform: Platform, tenant: Tenant, hub: HubServer, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / "torchrelay"), "upload", "Acme/Llama", "--name", "of-hub"]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "XDG_CACHE_HOME": str(cache)}
    env |= {"TRANSFORMERS_OFFLINE": "0", "HF_HOME": str(cache)}
    access = ("--url", platform.http, "--key", tenant.key)
    return subprocess.run([*command, *access], capture_output=True, text=True, timeout=120, env=env)


def test_model_of_hub_is_resumed_checked_and_served(platform: Platform, tenant: Tenant, tmp_path: Path) -> None:
    """Of a tenant that has published nothing: files that the platform has of it would not be sent."""
    name = new_id("hub")
    uploader = Tenant(platform, name, platform.tenant(name), tmp_path)
    folder = tenant.checkpoint("llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    cut_at, end = len(files[WEIGHTS]) // 2, len(files[WEIGHTS]) - 1
    with running_hub() as hub:
        hub.publish("Acme/Llama", files | {"README.md": b"not a part of the model"})
        hub.cut_at, hub.stays_cut = cut_at, True
        broken = upload(platform, uploader, hub, tmp_path)
        assert broken.returncode == 1 and f"{hub.url} does not answer" in broken.stderr
        hub.cut_at = None
        hub.damaged.add(WEIGHTS)
        hub.asked.clear()
        damaged = upload(platform, uploader, hub, tmp_path)
        assert damaged.returncode == 1 and f"{WEIGHTS}: its SHA-256 is" in damaged.stderr
        assert hub.ranges(WEIGHTS)[-1] == f"bytes={cut_at}-{end}"
        hub.damaged.clear()
        hub.asked.clear()
        published = upload(platform, uploader, hub, tmp_path)
        assert published.returncode == 0, published.stderr
        assert hub.ranges(WEIGHTS) == [f"bytes=0-{end}"], "the damaged bytes were dropped"
    with GatewayClient(platform.http, uploader.key) as client, GatewayClient(platform.http, tenant.key) as other:
        open_uploads = [upload["model"] for upload in client.call("GET", "/v1/uploads")["data"]]
        assert f"{uploader.name}/of-hub" not in open_uploads
        version = client.call("GET", "/v1/models/of-hub")["version"]
        assert version == other.call("GET", f"/v1/models/{tenant.model('llama')}")["version"], "named by its files"
    prompt = list(prompt_of(20))
    answer = complete(platform, uploader.key, f"{uploader.name}/of-hub", prompt, max_tokens=8)
    assert answer["choices"][0]["token_ids"] == reference(folder, prompt, 8)
