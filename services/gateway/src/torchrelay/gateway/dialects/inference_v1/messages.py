"""Messages of ``inference.v1`` to the token path's types and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.sampling import SHARED_NAMES
from torchrelay.gateway.inference.choice_reader import ScoredToken
from torchrelay.gateway.inference.core import GenerateParams, TokenDelta, Usage
from torchrelay.gateway.inference.parameter_ranges import (
    check_num_messages,
    check_role,
    check_sampling,
    check_top_logprobs,
)
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.inference.v1 import inference_pb2 as pb

_OPTIONAL: Final[tuple[Any, ...]] = (*SHARED_NAMES, "max_tokens", "top_logprobs", "seed")


def params_of_request(request: pb.GenerateRequest) -> GenerateParams:
    """Raises ``InvalidRequest`` naming the field, within the same ranges as REST."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    match request.WhichOneof("input"):
        case "prompt":
            fields["text"] = request.prompt
        case "chat":
            check_num_messages(len(request.chat.messages))
            for index, message in enumerate(request.chat.messages):
                check_role(message.role, index)
            fields["messages"] = tuple({"role": m.role, "content": m.content} for m in request.chat.messages)
        case "prompt_token_ids":
            fields["token_ids"] = tuple(request.prompt_token_ids.ids)
        case _:
            raise InvalidRequest("one of prompt, chat and prompt_token_ids must be set", field="prompt")
    for name, is_valid in (
        ("model", bool(request.model)),
        ("max_tokens", fields.get("max_tokens", 1) >= 1),
        ("top_k", fields.get("top_k", 0) < 1 << 31),
        ("min_tokens", fields.get("min_tokens", 0) < 1 << 31),
        ("n", not request.HasField("n") or request.n >= 1),
    ):
        if not is_valid:
            raise InvalidRequest(f"{name} is out of range", field=name)
    fields |= check_sampling(
        fields, request.logit_bias, request.stop, request.stop_token_ids, request.service_tier or "auto"
    )
    check_top_logprobs(fields.get("top_logprobs", 0))
    return GenerateParams(
        model=request.model,
        num_choices=request.n if request.HasField("n") else 1,
        ignore_eos=request.ignore_eos,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else None,
        **fields,
    )


def usage_message(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_output_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        cached_tokens=usage.num_cached_prompt_tokens,
    )


class AnswerConverter:
    """Turns the tokens of an answer into messages. The text has all that the model wrote."""

    def __init__(self, session: RequestSession, *, with_ids: bool) -> None:
        self._choices, self._tokens = session.choices(divides=False), session.tokens
        self._with_ids = with_ids

    def choices_of(self, deltas: Iterable[TokenDelta]) -> list[pb.ChoiceDelta]:
        return [self._choice_of(delta) for delta in deltas]

    def _choice_of(self, delta: TokenDelta) -> pb.ChoiceDelta:
        steps = list(self._choices[delta.choice].read(delta))
        return pb.ChoiceDelta(
            index=delta.choice,
            text="".join(step.content for step in steps),
            token_ids=delta.token_ids if self._with_ids else (),
            finish_reason=str(delta.finish) if delta.finish else "",
            logprobs=[self._logprob(step.scored) for step in steps if step.scored is not None],
        )

    def _logprob(self, token: ScoredToken) -> pb.TokenLogprob:
        assert self._tokens is not None, "the request has logprobs"
        logprobs, text_of = token.logprobs, self._tokens.of
        top = [pb.TopLogprob(token_id=each, token=text_of(each), logprob=value) for each, value in logprobs.top]
        return pb.TokenLogprob(token_id=token.token_id, token=token.placed.encoded, logprob=logprobs.chosen, top=top)
