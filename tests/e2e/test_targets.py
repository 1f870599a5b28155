"""Targets that an operator sets with the CLI are those of the next request, until they are taken back."""

from __future__ import annotations

import subprocess

import pytest

from tests.e2e.conftest import Tenant
from tests.support.completions import complete
from tests.support.platform import SCRIPTS, Platform

pytestmark = pytest.mark.e2e


def test_explain_says_the_targets_that_were_set_until_the_default_is_taken_again(
    platform: Platform, tenant: Tenant
) -> None:
    model = tenant.model()

    def said(*words: str) -> str:
        command = [str(SCRIPTS / "torchrelay"), *words, "--home", str(platform.home.path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def explained(tier: str) -> str:
        body = {"max_tokens": 2, "service_tier": tier}
        return said("explain", "--json", str(complete(platform, tenant.key, model, [5, 6, 7], **body)["id"]))

    set_ = said("models", "set", model, "--interactive-ttft-s", "0.75", "--tbt-target-s", "0.125")
    line = f"{model}: targets: first token in 750 ms (interactive); 125 ms between tokens"
    assert line in set_ and line in said("models")
    assert "targets (interactive): the first 750 ms after it came, 125 ms between tokens" in explained("priority")
    assert "targets (standard): the first 2 s after it came, 125 ms between tokens" in explained("default")
    back = said("models", "set", model, "--interactive-ttft-s", "0", "--tbt-target-s", "0")
    assert "targets" not in back and line not in said("models")
    assert "targets (interactive): the first 500 ms after it came, 100 ms between tokens" in explained("priority")
