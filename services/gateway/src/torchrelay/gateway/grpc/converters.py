"""Messages of ``inference.v1`` to the token path's types and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.inference.core import GenerateParams, LogprobDelta, TokenDelta, Usage
from torchrelay.gateway.inference.parameter_ranges import (
    check_biases,
    check_ranges,
    check_role,
    check_stop_tokens,
    check_stops,
    check_top_logprobs,
)
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.inference.text.token_bytes import TokenBytes
from torchrelay.inference.v1 import inference_pb2 as pb

_RANGED: Final = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_OPTIONAL: Final = (*_RANGED, "max_tokens", "top_k", "top_logprobs", "seed")


def params_of_request(request: pb.GenerateRequest) -> GenerateParams:
    """Raises ``InvalidRequest`` naming the field, with the bounds that REST has."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    match request.WhichOneof("input"):
        case "prompt":
            fields["text"] = request.prompt
        case "chat":
            for place, message in enumerate(request.chat.messages):
                check_role(message.role, place)
            fields["messages"] = tuple({"role": m.role, "content": m.content} for m in request.chat.messages)
        case "prompt_token_ids":
            fields["token_ids"] = tuple(request.prompt_token_ids.ids)
        case _:
            raise InvalidRequest("one of prompt, chat and prompt_token_ids must be set", field="prompt")
    for name, is_good in (
        ("model", bool(request.model)),
        ("messages", fields.get("messages") != ()),
        ("max_tokens", fields.get("max_tokens", 1) >= 1),
        ("top_k", fields.get("top_k", 0) < 1 << 31),
        ("n", not request.HasField("n") or request.n >= 1),
    ):
        if not is_good:
            raise InvalidRequest(f"{name} is out of its range", field=name)
    check_ranges({name: fields.get(name) for name in _RANGED})
    check_top_logprobs(fields.get("top_logprobs", 0))
    return GenerateParams(
        model=request.model,
        num_choices=request.n if request.HasField("n") else 1,
        logit_bias=check_biases(request.logit_bias),
        stop=check_stops(request.stop),
        stop_token_ids=check_stop_tokens(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        **fields,
    )


def usage_message(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_output_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        cached_tokens=usage.num_cached_prompt_tokens,
    )


def choice_deltas(session: RequestSession, deliveries: Iterable[TokenDelta], *, with_ids: bool) -> list[pb.ChoiceDelta]:
    deltas: list[pb.ChoiceDelta] = []
    for delivery in deliveries:
        text, tokens = session.texts[delivery.choice], session.tokens
        shown = "".join([text.step(token_id) for token_id in delivery.token_ids])
        if delivery.finish is not None:
            shown += text.flush()
        deltas.append(
            pb.ChoiceDelta(
                index=delivery.choice,
                text=shown,
                token_ids=delivery.token_ids if with_ids else (),
                finish_reason=str(delivery.finish) if delivery.finish else "",
                logprobs=() if tokens is None else _logprobs(tokens, delivery),
            )
        )
    return deltas


def _logprobs(tokens: TokenBytes, delivery: TokenDelta) -> Iterator[pb.TokenLogprob]:
    for token_id, told in LogprobDelta.told(delivery):
        top = [pb.TopLogprob(token_id=each, token=tokens.of(each), logprob=value) for each, value in told.top]
        yield pb.TokenLogprob(token_id=token_id, token=tokens.of(token_id), logprob=told.chosen, top=top)
