"""Responses: the whole answer, or a piece of it."""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.gateway.dialects.open_inference.tensors import Output, add_outputs
from torchrelay.gateway.inference.core import TokenDelta, Usage
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.inference.v2 import open_inference_pb2 as pb

_FINAL = "triton_final_response"


class InferAnswer:
    """The answer to ``request``, whose prompt is left out of it from now on."""

    def __init__(self, request: pb.ModelInferRequest, session: RequestSession) -> None:
        self._request = pb.ModelInferRequest(id=request.id, outputs=request.outputs)
        if request.raw_input_contents:
            self._request.raw_input_contents.append(b"")
        self._session, self._choices = session, session.choices(divides=False)
        self._texts = [""] * len(session.texts)
        self._finished = [""] * len(session.texts)

    def add(self, deltas: Iterable[TokenDelta]) -> None:
        """Adds tokens to the next response."""
        for delta in deltas:
            steps = self._choices[delta.choice].read(delta)
            self._texts[delta.choice] += "".join(step.content for step in steps)
            if delta.finish is not None:
                self._finished[delta.choice] = str(delta.finish)

    def response(self, usage: Usage, *, is_final: bool) -> pb.ModelInferResponse:
        """The text since the last response."""
        resolved = self._session.request.resolved
        response = pb.ModelInferResponse(
            model_name=resolved.model.name, model_version=resolved.model.version.version_id, id=self._request.id
        )
        response.parameters[_FINAL].bool_param = is_final
        outputs = [
            Output("text_output", [text.encode() for text in self._texts]),
            Output("finish_reason", [reason.encode() for reason in self._finished]),
            Output("num_input_tokens", [usage.num_prompt_tokens]),
            Output("num_output_tokens", [usage.num_output_tokens]),
        ]
        add_outputs(response, self._request, outputs)
        self._texts = [""] * len(self._texts)
        return response
