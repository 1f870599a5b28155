"""Messages of ``inference.v1`` to the token path's types and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.sampling import SHARED_NAMES
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.gateway.inference.core import GenerateParams, TokenDelta, TokenLogprobs, Usage
from torchrelay.gateway.inference.parameter_ranges import (
    check_num_messages,
    check_role,
    check_sampling,
    check_top_logprobs,
)
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.inference.text.detokenizer import PlacedToken
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


def choice_deltas(session: RequestSession, new_tokens: Iterable[TokenDelta], *, with_ids: bool) -> list[pb.ChoiceDelta]:
    deltas: list[pb.ChoiceDelta] = []
    for delta in new_tokens:
        text, logprobs = session.texts[delta.choice], list[pb.TokenLogprob]()
        if session.tokens is None:
            new_text = "".join([text.step(token_id) for token_id in delta.token_ids])
        else:
            placed = list(session.placed(delta))
            new_text = "".join([token.shown for token, _, _ in placed])
            logprobs = [_logprob(session.tokens, *token) for token in placed]
        if delta.finish is not None:
            new_text += text.flush()
        deltas.append(
            pb.ChoiceDelta(
                index=delta.choice,
                text=new_text,
                token_ids=delta.token_ids if with_ids else (),
                finish_reason=str(delta.finish) if delta.finish else "",
                logprobs=logprobs,
            )
        )
    return deltas


def _logprob(tokens: TokenBytes, placed: PlacedToken, token_id: int, logprobs: TokenLogprobs) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=each, token=tokens.of(each), logprob=value) for each, value in logprobs.top]
    return pb.TokenLogprob(token_id=token_id, token=placed.encoded, logprob=logprobs.chosen, top=top)
