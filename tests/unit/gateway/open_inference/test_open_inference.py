"""The Open Inference Protocol, with a real client: the same answers, limits and bills as in the other dialects."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tests.support.gateway_ports import KEY, PRINCIPAL
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.errors import InvalidRequest, NotFound, PermissionDenied, TorchrelayError, Unauthenticated
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.inference.v2 import open_inference_pb2 as pb
from torchrelay.inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub

METADATA = (("authorization", f"Bearer {KEY}"),)
TEXT = "The torch is handed on"


@pytest.fixture
async def stub(rig: TokenPathRig) -> AsyncIterator[Any]:
    channel = open_channel(rig.grpc_address)
    yield GRPCInferenceServiceStub(channel)
    await channel.close()


def tensor(name: str, value: str | bool) -> pb.ModelInferRequest.InferInputTensor:
    if isinstance(value, bool):
        contents = pb.InferTensorContents(bool_contents=[value])
    else:
        contents = pb.InferTensorContents(bytes_contents=[value.encode()])
    datatype = "BOOL" if isinstance(value, bool) else "BYTES"
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[1], contents=contents)


def parameter(value: Any) -> pb.InferParameter:
    match value:
        case bool():
            return pb.InferParameter(bool_param=value)
        case int():
            return pb.InferParameter(int64_param=value)
        case float():
            return pb.InferParameter(double_param=value)
        case _:
            return pb.InferParameter(string_param=value)


def request(text: str = TEXT, inputs: Iterable[Any] = (), **parameters: Any) -> pb.ModelInferRequest:
    given = {"max_tokens": 12, "temperature": 0.0, **parameters}
    return pb.ModelInferRequest(
        model_name="echo",
        id="a1",
        inputs=[tensor("text_input", text), *inputs],
        parameters={name: parameter(value) for name, value in given.items()},
    )


def outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    return {
        output.name: [element.decode() for element in output.contents.bytes_contents]
        or list(output.contents.uint_contents)
        for output in response.outputs
    }


async def completion(rig: TokenPathRig, **fields: Any) -> Any:
    body = {"model": "echo", "prompt": TEXT, "max_tokens": 12, "temperature": 0, **fields}
    return (await rig.http.post("/v1/completions", json=body)).json()


async def test_answer_is_that_of_a_completion_and_is_billed(rig: TokenPathRig, stub: Any) -> None:
    response = await stub.ModelInfer(request(), metadata=METADATA)
    reply = await completion(rig)
    assert outputs(response) == {
        "text_output": [reply["choices"][0]["text"]],
        "finish_reason": ["length"],
        "num_input_tokens": [reply["usage"]["prompt_tokens"]],
        "num_output_tokens": [12],
    }
    assert (response.model_name, response.id) == ("acme/echo", "a1") and response.model_version
    assert [usage.num_output_tokens for usages in rig.ports.settled.values() for usage in usages] == [12, 12]


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"n": 2, "seed": 7}, {"n": 2, "seed": 7}),
        ({"temperature": "0.5", "seed": 3, "top_p": "0.9"}, {"temperature": 0.5, "seed": 3, "top_p": 0.9}),
        ({"stop": "torch"}, {"stop": "torch"}),
        ({"stop": '["zzz", "is"]'}, {"stop": ["zzz", "is"]}),
        ({"sampling_parameters": {"max_tokens": "5", "stop": ["zzz"]}}, {"max_tokens": 5}),
        ({"triton_enable_empty_final_response": True}, {}),
    ],
)
async def test_parameters_are_those_of_completions(
    rig: TokenPathRig, stub: Any, given: dict[str, Any], fields: dict[str, Any]
) -> None:
    sampling = given.pop("sampling_parameters", None)
    inputs = [] if sampling is None else [tensor("sampling_parameters", json.dumps(sampling))]
    response = await stub.ModelInfer(request(inputs=inputs, **given), metadata=METADATA)
    reply = await completion(rig, **fields)
    assert outputs(response)["text_output"] == [choice["text"] for choice in reply["choices"]]
    assert outputs(response)["finish_reason"] == [choice["finish_reason"] for choice in reply["choices"]]


async def test_stream_has_the_pieces_and_goes_on_after_an_error(rig: TokenPathRig, stub: Any) -> None:
    made = [
        request(inputs=[tensor("stream", True)], n=2),
        request(temperature=3),
        request(stream=True),
        request(),
    ]
    responses = [response async for response in stub.ModelStreamInfer(iter(made), metadata=METADATA)]
    answers: list[list[pb.ModelInferResponse]] = [[]]
    for response in responses:
        answers[-1].append(response.infer_response)
        assert response.infer_response.id == "a1"
        if response.error_message or response.infer_response.parameters["triton_final_response"].bool_param:
            answers.append([])
    assert [response.error_message for response in responses if response.error_message] == [
        "invalid_request: temperature must be between 0 and 2, not 3"
    ]
    several, failed, streamed, whole, nothing = answers
    assert len(failed) == len(whole) == 1 and not failed[0].outputs and nothing == []
    reply = await completion(rig, n=2)
    pieces = [outputs(response)["text_output"] for response in several]
    assert len(pieces) > 2
    assert ["".join(column) for column in zip(*pieces, strict=True)] == [each["text"] for each in reply["choices"]]
    text = "".join(outputs(response)["text_output"][0] for response in streamed)
    assert outputs(whole[0])["text_output"] == [text] == [reply["choices"][0]["text"]]
    assert outputs(streamed[-1])["num_output_tokens"] == [12] and len(rig.ports.settled) == 4


async def test_raw_contents_are_answered_by_raw_contents(rig: TokenPathRig, stub: Any) -> None:
    raw = struct.pack("<I", len(TEXT)) + TEXT.encode()
    inputs = [pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])]
    wanted = [
        pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in ("num_output_tokens", "text_output")
    ]
    made = pb.ModelInferRequest(
        model_name="echo", inputs=inputs, outputs=wanted, raw_input_contents=[raw], parameters=request().parameters
    )
    response = await stub.ModelInfer(made, metadata=METADATA)
    assert [output.name for output in response.outputs] == ["text_output", "num_output_tokens"]
    expected = (await completion(rig))["choices"][0]["text"].encode()
    assert list(response.raw_output_contents) == [struct.pack("<I", len(expected)) + expected, struct.pack("<I", 12)]


def changed(**fields: Any) -> pb.ModelInferRequest:
    made = request()
    made.MergeFrom(pb.ModelInferRequest(**fields))
    return made


WRONG_TYPE = tensor("text_input", "a")
WRONG_TYPE.datatype = "FP32"
TWO = tensor("text_input", "a")
TWO.contents.bytes_contents.append(b"b")


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (request(temperature=3), "temperature"),
        (request(max_tokens="many"), "max_tokens"),
        (request(logprobs=1), "logprobs"),
        (request(beam_width=2), "beam_width"),
        (request(stream=True), "stream"),
        (request(""), "prompt"),
        (request(inputs=[tensor("exclude_input_in_output", False)]), "exclude_input_in_output"),
        (request(inputs=[tensor("sampling_parameters", "[]")]), "sampling_parameters"),
        (request(inputs=[tensor("image", "a")]), "inputs"),
        (request(inputs=[tensor("text_input", "a")]), "inputs"),
        (pb.ModelInferRequest(model_name="echo"), "text_input"),
        (pb.ModelInferRequest(model_name="echo", inputs=[WRONG_TYPE]), "text_input"),
        (pb.ModelInferRequest(model_name="echo", inputs=[TWO]), "text_input"),
        (changed(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="logits")]), "outputs"),
        (changed(raw_input_contents=[b"", b""]), "raw_input_contents"),
        (changed(raw_input_contents=[b"\x05\0\0\0a"]), "text_input"),
        (changed(parameters={"seed": pb.InferParameter()}), "seed"),
    ],
)
async def test_faulty_requests_name_their_field(stub: Any, made: pb.ModelInferRequest, field: str) -> None:
    error = await error_of(stub.ModelInfer(made, metadata=METADATA))
    assert isinstance(error, InvalidRequest) and error.field == field, error


async def error_of(call: Any) -> TorchrelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_cut_raw_contents_are_refused(stub: Any) -> None:
    inputs = [pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])]
    made = pb.ModelInferRequest(model_name="echo", inputs=inputs, raw_input_contents=[b"\x05\0\0\0a"])
    error = await error_of(stub.ModelInfer(made, metadata=METADATA))
    assert isinstance(error, InvalidRequest) and "within an element" in error.message


async def test_keys_and_limits_are_those_of_all_dialects(rig: TokenPathRig, stub: Any) -> None:
    calls = (
        (stub.ModelInfer, request()),
        (stub.ModelReady, pb.ModelReadyRequest(name="echo")),
        (stub.ModelMetadata, pb.ModelMetadataRequest(name="echo")),
    )
    for call, made in calls:
        assert isinstance(await error_of(call(made)), Unauthenticated)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.ModelStreamInfer(iter([request()]))))
    assert isinstance(error_from_rpc(caught.value), Unauthenticated)
    rig.ports.principals[KEY] = replace(PRINCIPAL, is_admin=True)
    assert isinstance(await error_of(stub.ModelInfer(request(), metadata=METADATA)), PermissionDenied)
    rig.ports.principals[KEY] = PRINCIPAL
    assert not rig.ports.opened


async def test_server_is_described_without_a_key(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    metadata = await stub.ServerMetadata(pb.ServerMetadataRequest())
    assert metadata.name == "torchrelay" and metadata.version


async def test_faulty_server_is_not_ready(make_rig: MakeRig) -> None:
    async def fault() -> str:
        return "the database is lost"

    rig = await make_rig(fault=fault)
    async with open_channel(rig.grpc_address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live


async def test_models_are_described_and_stay_asleep(rig: TokenPathRig, stub: Any) -> None:
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="echo"), metadata=METADATA)
    assert metadata.name == "acme/echo" and metadata.platform == "torchrelay"
    assert metadata.inputs[0].name == "text_input"
    assert metadata.outputs[0].name == "text_output"
    [version] = metadata.versions
    for name, given, is_ready in (("echo", "", True), ("echo", version, True), ("echo", "9", False), ("no", "", False)):
        reply = await stub.ModelReady(pb.ModelReadyRequest(name=name, version=given), metadata=METADATA)
        assert reply.ready == is_ready
    unknown = stub.ModelMetadata(pb.ModelMetadataRequest(name="echo", version="9"), metadata=METADATA)
    assert isinstance(await error_of(unknown), NotFound)
    other = request()
    other.model_version = "9"
    assert isinstance(await error_of(stub.ModelInfer(other, metadata=METADATA)), NotFound)
    assert not rig.scheduler.admits


async def test_client_that_leaves_a_stream_is_billed_for_what_it_got(make_rig: MakeRig) -> None:
    rig = await make_rig()
    rig.model.step_s = 0.02
    async with open_channel(rig.grpc_address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request(stream=True, max_tokens=400)]), metadata=METADATA)
        await anext(aiter(call))
        call.cancel()
    await rig.token_path.pipeline.drain(10, 1)
    [usages] = rig.ports.settled.values()
    assert 0 < usages[0].num_output_tokens < 400


async def test_silent_streams_leave_other_calls_their_turns(make_rig: MakeRig) -> None:
    limits = {"max_body_bytes": 1 << 20, "max_buffered_body_bytes_per_tenant": 2 << 20}
    rig = await make_rig(body_silence_s=60.0, **limits)
    async with open_channel(rig.grpc_address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        streams = [stub.ModelStreamInfer(metadata=METADATA) for _ in range(3)]
        for stream in streams:
            await stream.initial_metadata()  # it waits for its first message
        assert outputs(await stub.ModelInfer(request(), metadata=METADATA, timeout=10))["num_output_tokens"] == [12]

        async def answered(stream: Any) -> list[int]:
            await stream.write(request())
            num_tokens: list[int] = outputs((await stream.read()).infer_response)["num_output_tokens"]
            await stream.done_writing()
            return num_tokens

        # Two of them have the tenant's turns to send a message; the third waits for a turn, not for the time limit.
        assert await asyncio.gather(*map(answered, streams)) == [[12]] * 3


async def test_stream_that_stays_silent_ends(make_rig: MakeRig) -> None:
    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield request()
        await asyncio.Event().wait()

    rig = await make_rig(body_silence_s=2.0)
    responses: list[pb.ModelStreamInferResponse] = []
    async with open_channel(rig.grpc_address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in stub.ModelStreamInfer(requests(), metadata=METADATA):
                responses.append(response)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert [outputs(response.infer_response)["num_output_tokens"] for response in responses] == [[12]]
