"""Fixtures of the policy's tests."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import CountedPlacements
from torchrelay.scheduler.policy.dispatch import dispatch


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedPlacements:
    counted = CountedPlacements()
    monkeypatch.setattr(dispatch, "place", counted)
    return counted
