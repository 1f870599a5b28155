"""Errors for the sender of a prompt that was not encoded. Pure."""

from __future__ import annotations

import signal

from torchrelay.common.errors import (
    ContextLengthExceeded,
    DataCorrupted,
    InvalidRequest,
    TorchrelayError,
    Unavailable,
)
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.sampling import context_exceeded, too_long
from torchrelay.gateway.inference.text.processes.frames import TOKENIZER, Refusal, TextLimits
from torchrelay.gateway.inference.text.processes.text_pool import FileRefused, PromptKilled


def refusal_error(refusal: Refusal, model: PublishedModel, field: str) -> TorchrelayError:
    """The error of an upload or a request at fault; ``field`` holds the prompt."""
    shape = model.version.shape
    match refusal.cause:
        case "no_template":
            message = f"{model.name} has no chat template; use /v1/completions, or publish the model with one"
            return InvalidRequest(message, field=field)
        case "no_tools":
            message = f"the chat template of {model.name} knows no tools; send the request without tools and tool_calls"
            return InvalidRequest(message, field="tools")
        case "tool_calls":
            message = f"{model.name} writes tool calls in a syntax that is not supported yet"
            return InvalidRequest(message, field="tools")
        case "template":
            return InvalidRequest(f"the model's chat template failed: {refusal.detail}", field=field)
        case "characters":
            return too_many_characters(refusal.number, model, field)
        case "tokenizer":
            return InvalidRequest(f"the tokenizer of {model.name} cannot encode this text", field=field)
        case "vocabulary":
            message = (
                f"the prompt contains token {refusal.detail!r} ({refusal.number}); "
                f"the model's token ids are 0 to {shape.vocab_size - 1}"
            )
            return InvalidRequest(message, field=field)
        case "format":
            return InvalidRequest(f"{field}: no answer can follow this format: {refusal.detail}", field=field)
        case "tokens":
            return context_exceeded(refusal.number, shape.max_context_tokens, field)
        case _:
            raise AssertionError(f"{refusal.cause} is no refusal of a prompt")


def file_error(refused: FileRefused) -> TorchrelayError:
    """The error of a file that cannot be read."""
    if refused.name == TOKENIZER:
        return InvalidRequest(f"{refused.name} cannot be read: {refused.detail}", field=refused.name)
    return DataCorrupted(f"cannot read the model's chat format: {refused.detail}", field=refused.name)


def kill_error(killed: PromptKilled, limits: TextLimits, field: str) -> TorchrelayError:
    """The error of a prompt whose process was killed: it names the file or part, and the limit."""
    max_mb = limits.max_memory_bytes >> 20
    if killed.status == -signal.SIGPROF and killed.loading is not None:
        message = f"the model's {killed.loading} takes more than {limits.load_cpu_s:g} s of CPU to load"
        return InvalidRequest(message, field=killed.loading)
    if killed.status == -signal.SIGPROF:
        message = f"the model's chat template failed: it took longer than {limits.prompt_cpu_s:g} s"
        return InvalidRequest(message, field=field)
    if killed.status == -signal.SIGVTALRM:
        message = f"the model's tokenizer took longer than {limits.prompt_cpu_s:g} s for this text, or its format"
        return InvalidRequest(message, field=field)
    if killed.status == -signal.SIGKILL:
        return Unavailable("the process that tokenized the prompt was killed")
    part = "chat template, tokenizer or format of the answer" if killed.loading is None else killed.loading
    message = f"the model's {part} exceeded the limit of {max_mb} MB of memory, or crashed its process"
    return InvalidRequest(message, field=killed.loading or field)


def too_many_characters(num_chars: int, model: PublishedModel, field: str) -> ContextLengthExceeded:
    max_tokens = model.version.shape.max_context_tokens
    return ContextLengthExceeded(too_long(f"{num_chars} characters", max_tokens), field=field)
