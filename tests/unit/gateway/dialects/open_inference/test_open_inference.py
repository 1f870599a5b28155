"""The Open Inference Protocol: what it has beside the promises of all dialects."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.support.cpu_steps import short_step
from tests.support.http2_client import http2_client
from tests.support.wait import HANG_S, eventually
from tests.unit.gateway.dialects.all_dialects import (
    METADATA,
    infer_request,
    infer_tensor,
    open_inference_stub,
    outputs_of,
)
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.errors import InvalidRequest, NotFound, TorchrelayError, Unauthenticated
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.gateway.core import Principal
from torchrelay.gateway.dialects.open_inference.parameters import params_of
from torchrelay.gateway.dialects.open_inference.tensors import check_outputs, inputs_of
from torchrelay.inference.v2 import open_inference_pb2 as pb

TEXT = "The torch is handed on"
InputTensor, OutputTensor = pb.ModelInferRequest.InferInputTensor, pb.ModelInferRequest.InferRequestedOutputTensor


@pytest.fixture
async def stub(rig: TokenPathRig) -> AsyncIterator[Any]:
    async with open_inference_stub(rig) as stub:
        yield stub


def request(text: str = TEXT, *inputs: Any, **parameters: Any) -> pb.ModelInferRequest:
    made: pb.ModelInferRequest = infer_request(
        text, inputs=inputs, **{"max_tokens": 12, "temperature": 0.0, **parameters}
    )
    return made


async def completion(rig: TokenPathRig, **fields: Any) -> Any:
    body = {"model": "echo", "prompt": TEXT, "max_tokens": 12, "temperature": 0, **fields}
    return (await rig.http.post("/v1/completions", json=body)).json()


async def error_of(call: Any) -> TorchrelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({}, {}),
        ({"n": 2, "seed": 7}, {"n": 2, "seed": 7}),
        ({"temperature": "0.5", "seed": 3, "top_p": "0.9"}, {"temperature": 0.5, "seed": 3, "top_p": 0.9}),
        ({"stop": "torch"}, {"stop": "torch"}),
        ({"stop": '["zzz", "is"]'}, {"stop": ["zzz", "is"]}),
        ({"sampling_parameters": {"max_tokens": "5", "stop": ["zzz"]}}, {"max_tokens": 5}),
        ({"triton_enable_empty_final_response": True}, {}),
    ],
)
async def test_answer_and_parameters_are_those_of_completions(
    rig: TokenPathRig, stub: Any, given: dict[str, Any], fields: dict[str, Any]
) -> None:
    sampling = given.pop("sampling_parameters", None)
    inputs = [] if sampling is None else [infer_tensor("sampling_parameters", json.dumps(sampling))]
    response = await stub.ModelInfer(request(TEXT, *inputs, **given), metadata=METADATA)
    reply = await completion(rig, **fields)
    assert outputs_of(response) == {
        "text_output": [choice["text"] for choice in reply["choices"]],
        "finish_reason": [choice["finish_reason"] for choice in reply["choices"]],
        "num_input_tokens": [reply["usage"]["prompt_tokens"]],
        "num_output_tokens": [reply["usage"]["completion_tokens"]],
    }
    assert (response.model_name, response.id) == ("acme/echo", "a1") and response.model_version


async def test_stream_has_the_pieces_and_goes_on_after_an_error(rig: TokenPathRig, stub: Any) -> None:
    made = [request(TEXT, infer_tensor("stream", True), n=2), request(temperature=3), request(stream=True), request()]
    responses = []
    for worker in rig.workers:
        worker.pause_at = 6
    async for response in stub.ModelStreamInfer(iter(made), metadata=METADATA):
        responses.append(response)
        for worker in rig.workers:  # after the first piece, which a slow gateway may have made of all tokens before
            worker.resume()
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
    pieces = [outputs_of(response)["text_output"] for response in several]
    assert len(pieces) > 1
    assert ["".join(column) for column in zip(*pieces, strict=True)] == [each["text"] for each in reply["choices"]]
    text = "".join(outputs_of(response)["text_output"][0] for response in streamed)
    assert outputs_of(whole[0])["text_output"] == [text] == [reply["choices"][0]["text"]]
    assert outputs_of(streamed[-1])["num_output_tokens"] == [12] and len(rig.ports.settled) == 4


async def test_raw_contents_are_answered_by_raw_contents(rig: TokenPathRig, stub: Any) -> None:
    raw = struct.pack("<I", len(TEXT)) + TEXT.encode()
    made = request()
    made.inputs[0].ClearField("contents")
    made.raw_input_contents.append(raw)
    made.outputs.extend([OutputTensor(name="num_output_tokens"), OutputTensor(name="text_output")])
    response = await stub.ModelInfer(made, metadata=METADATA)
    assert [output.name for output in response.outputs] == ["text_output", "num_output_tokens"]
    expected = (await completion(rig))["choices"][0]["text"].encode()
    assert list(response.raw_output_contents) == [struct.pack("<I", len(expected)) + expected, struct.pack("<I", 12)]
    made.raw_input_contents[0] = b"\x05\0\0\0a"
    error = await error_of(stub.ModelInfer(made, metadata=METADATA))
    assert isinstance(error, InvalidRequest) and "within an element" in error.message


def of_raw(datatype: str, name: str, content: bytes) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        inputs=[InputTensor(name=name, datatype=datatype, shape=[1])], raw_input_contents=[content]
    )


def test_no_request_takes_the_event_loop() -> None:
    """Each has 8 MiB; raw contents took 1.1 s for 4 MiB, parameters 0.7 s for 3."""
    num_bytes, unknown = 8 << 20, pb.InferParameter(int64_param=1)
    shaped, wide = request(), request()
    shaped.inputs[0].shape[:] = [1] * num_bytes
    for number in range(num_bytes // 16):
        wide.parameters[f"p{number}"].CopyFrom(unknown)
    many = request()
    many.outputs.extend([OutputTensor(name="text_output")] * (num_bytes // 16))
    nested = request(TEXT, infer_tensor("sampling_parameters", "{" + '"a":1,' * (num_bytes // 6) + '"b":1}'))

    def answer(made: pb.ModelInferRequest) -> None:
        inputs = inputs_of(made)
        check_outputs(made)
        params_of(made, inputs)

    for made in (
        of_raw("BYTES", "text_input", bytes(num_bytes)),
        of_raw("BOOL", "stream", bytes(num_bytes)),
        *(shaped, wide, many, nested),
        request(logit_bias='{"1":' + "[" * num_bytes),
    ):
        with short_step(), pytest.raises(InvalidRequest):
            answer(made)


def changed(**fields: Any) -> pb.ModelInferRequest:
    made = request()
    made.MergeFrom(pb.ModelInferRequest(**fields))
    return made


WRONG_TYPE, TWO = infer_tensor("text_input", "a"), infer_tensor("text_input", "a")
WRONG_TYPE.datatype = "FP32"
TWO.contents.bytes_contents.append(b"b")


async def test_faulty_requests_name_their_field(stub: Any) -> None:
    for made, field in (
        (request(stream=True), "stream"),
        (request(""), "prompt"),
        (request(TEXT, infer_tensor("exclude_input_in_output", False)), "exclude_input_in_output"),
        (request(TEXT, infer_tensor("sampling_parameters", "[]")), "sampling_parameters"),
        (request(TEXT, infer_tensor("image", "a")), "inputs"),
        (request(TEXT, infer_tensor("text_input", "a")), "inputs"),
        (pb.ModelInferRequest(model_name="echo"), "text_input"),
        (pb.ModelInferRequest(model_name="echo", inputs=[WRONG_TYPE]), "text_input"),
        (pb.ModelInferRequest(model_name="echo", inputs=[TWO]), "text_input"),
        (changed(outputs=[OutputTensor(name="logits")]), "outputs"),
        (changed(raw_input_contents=[b"", b""]), "raw_input_contents"),
        (changed(raw_input_contents=[b"\x05\0\0\0a"]), "text_input"),
        (changed(parameters={"seed": pb.InferParameter()}), "seed"),
    ):
        error = await error_of(stub.ModelInfer(made, metadata=METADATA))
        assert isinstance(error, InvalidRequest) and error.field == field, (made, error)


async def test_models_are_described_to_keys_and_stay_asleep(rig: TokenPathRig, stub: Any) -> None:
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="echo"), metadata=METADATA)
    assert (metadata.name, metadata.platform) == ("acme/echo", "torchrelay")
    assert (metadata.inputs[0].name, metadata.outputs[0].name) == ("text_input", "text_output")
    [version] = metadata.versions
    for name, given, is_ready in (("echo", "", True), ("echo", version, True), ("echo", "9", False), ("no", "", False)):
        reply = await stub.ModelReady(pb.ModelReadyRequest(name=name, version=given), metadata=METADATA)
        assert reply.ready == is_ready
    unknown, other = pb.ModelMetadataRequest(name="echo", version="9"), request()
    other.model_version = "9"
    assert isinstance(await error_of(stub.ModelMetadata(unknown, metadata=METADATA)), NotFound)
    assert isinstance(await error_of(stub.ModelInfer(other, metadata=METADATA)), NotFound)
    for call, made in ((stub.ModelReady, pb.ModelReadyRequest(name="echo")), (stub.ModelMetadata, unknown)):
        assert isinstance(await error_of(call(made)), Unauthenticated)
    assert not rig.scheduler.admits


async def test_server_is_described_without_a_key(make_rig: MakeRig) -> None:
    faults = {"now": ""}

    async def fault() -> str:
        return faults["now"]

    async with open_inference_stub(await make_rig(fault=fault)) as stub:
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        faults["now"] = "the database is lost"
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        metadata = await stub.ServerMetadata(pb.ServerMetadataRequest())
    assert metadata.name == "torchrelay" and metadata.version


async def test_silent_streams_hold_no_turns(make_rig: MakeRig) -> None:
    """Nor do two silent calls of each tenant hold all places of messages."""
    rig = await make_rig(message_timeout_s=4 * HANG_S)
    for index in range(6):
        rig.ports.principals[f"tr-{index}"] = Principal(f"t-{index}", f"tenant{index}", f"k-{index}")
        rig.ports.published[f"tenant{index}/echo"] = rig.ports.published["acme/echo"]

    def metadata(index: int) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer tr-{index}"),)

    with http2_client(rig.grpc_address) as silent:
        async with open_inference_stub(rig) as stub, asyncio.timeout(HANG_S):
            streams = [stub.ModelStreamInfer(metadata=metadata(index // 3)) for index in range(15)]
            for stream in streams:
                await stream.initial_metadata()  # it waits for its first message
            silent.greet()
            for index in range(10):
                silent.open_call(1 + 2 * index, "/inference.GRPCInferenceService/ModelInfer", *metadata(index // 2))
            await eventually(lambda: rig.shares.requests.num_held == 25)
            assert rig.shares.streams.num_held == 15

            assert outputs_of(await stub.ModelInfer(request(), metadata=metadata(5)))["num_output_tokens"] == [12]
            for stream in streams[::-1]:
                for _ in range(2):
                    await stream.write(request())
                    answer = await stream.read()
                    assert outputs_of(answer.infer_response)["num_output_tokens"] == [12]
            await stub.ModelInfer(request(), metadata=metadata(0))
            for stream in streams:
                await stream.done_writing()
                assert await stream.read() is grpc.aio.EOF


async def test_messages_sent_in_advance_are_answered_in_turn(stub: Any) -> None:
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        stream = stub.ModelStreamInfer(metadata=METADATA, compression=compression)
        for length in (4, 300_000, 5):
            await stream.write(request("x" * length, max_tokens=4))
        await stream.done_writing()
        assert len([response async for response in stream]) == 3


async def test_revoked_key_begins_no_further_request_of_a_stream(rig: TokenPathRig, stub: Any) -> None:
    stream = stub.ModelStreamInfer(metadata=METADATA)
    await stream.write(request())
    assert outputs_of((await stream.read()).infer_response)["num_output_tokens"] == [12]
    rig.ports.principals.clear()
    await stream.write(request())
    assert isinstance(await error_of(stream.read()), Unauthenticated)
    assert len(rig.ports.settled) == 1


async def test_stream_that_stays_silent_ends(make_rig: MakeRig) -> None:
    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield request()
        await asyncio.Event().wait()

    responses: list[pb.ModelStreamInferResponse] = []
    async with open_inference_stub(await make_rig(message_timeout_s=2.0)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in stub.ModelStreamInfer(requests(), metadata=METADATA):
                responses.append(response)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert [outputs_of(response.infer_response)["num_output_tokens"] for response in responses] == [[12]]
