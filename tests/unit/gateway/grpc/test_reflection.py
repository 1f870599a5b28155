"""Reflection of the public services, with a real client."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2 as pb

from tests.support.gateway_ports import KEY
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.net.rpc.channels import open_channel

METADATA = (("authorization", f"Bearer {KEY}"),)
V1, ALPHA = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"


async def reflected(
    rig: TokenPathRig, service: str, requests: list[pb.ServerReflectionRequest], metadata: Any = METADATA
) -> list[pb.ServerReflectionResponse]:
    async with open_channel(rig.grpc_address) as channel:
        call = channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )
        return [reply async for reply in call(iter(requests), metadata=metadata)]


@pytest.mark.parametrize("service", [V1, ALPHA])
async def test_public_services_are_listed_and_described(rig: TokenPathRig, service: str) -> None:
    listing = pb.ServerReflectionRequest(list_services="")
    symbols = ["inference.GRPCInferenceService", "torchrelay.inference.v1.Inference", "grpc.health.v1.Health"]
    requests = [listing, *(pb.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols)]
    listed, *described = await reflected(rig, service, requests)
    assert {entry.name for entry in listed.list_services_response.service} == {*symbols, V1, ALPHA}
    for symbol, reply in zip(symbols, described, strict=True):
        [encoded] = reply.file_descriptor_response.file_descriptor_proto
        file = FileDescriptorProto.FromString(encoded)
        assert symbol in {f"{file.package}.{service.name}" for service in file.service}


async def test_contracts_between_services_are_not_shown(rig: TokenPathRig) -> None:
    symbol = "torchrelay.control.v1.Scheduler"
    [reply] = await reflected(rig, V1, [pb.ServerReflectionRequest(file_containing_symbol=symbol)])
    assert reply.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_reflection_needs_a_key(rig: TokenPathRig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflected(rig, V1, [pb.ServerReflectionRequest(list_services="")], ())
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
