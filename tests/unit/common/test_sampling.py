from __future__ import annotations

from typing import Any

from torchrelay.common.sampling import RANGES, SHARED_NAMES, SharedSampling, shared_sampling
from torchrelay.control.v1 import generation_pb2
from torchrelay.engine.core import SamplingParams
from torchrelay.gateway.bodies.shared_body import BaseBody
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.inference.v1 import inference_pb2


def test_shared_parameters_exist_in_all_messages() -> None:
    fields = [
        BaseBody.__struct_fields__,
        inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name,
        generation_pb2.Sampling.DESCRIPTOR.fields_by_name,
    ]
    assert all(set(SHARED_NAMES) <= set(each) for each in fields)


def test_shared_parameters_survive_every_step() -> None:
    given: dict[str, Any] = {name: 0.5 if name in RANGES else 3 for name in SHARED_NAMES}
    params = GenerateParams("m", text="x", **given)
    message = generation_pb2.Sampling(**shared_sampling(params))
    assert shared_sampling(SamplingParams(**shared_sampling(message))) == given


def test_defaults_are_within_their_ranges() -> None:
    assert all(low <= getattr(SharedSampling(), name) <= high for name, (low, high) in RANGES.items())
