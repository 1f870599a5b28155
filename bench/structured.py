"""The cost of answers in a format: masks in a step of 32 rows, and the first use of a JSON schema.

    python bench/structured.py [--quick]

A step is that of an engine with a vocabulary of real size, at the API's default temperature, whose 32 rows follow a
JSON schema; the share of masks is measured within it. A first use is the gateway's check of a new schema, its
compilation by the worker and the first mask. The tables that llguidance makes of a model's vocabulary, once per model
and worker, are printed apart.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.random_checkpoint import LlamaShape, write_checkpoint
from bench.report import Check, finish, parser_of, progress
from tests.support.sample_tokenizers import large_tokenizer
from tests.unit.engine.harness import Model
from torchrelay.common.tokens.grammar import Grammar, GrammarCompiler, grammar_error
from torchrelay.common.tokens.tokenizer import load_decoder
from torchrelay.engine.core import ChoiceSpec, GroupSpec, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.sampling import sampler
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat, json_rule
from torchrelay.gateway.inference.answers.grammars import grammar_source
from torchrelay.gateway.inference.answers.syntax import PLAIN

ROWS = 32
VOCAB_SIZE = 128_001
POOL_BYTES = 256 << 20
NUM_SCHEMAS = 40


def schema(number: int) -> dict[str, Any]:
    """A schema of an order, as applications ask for; each number has other names."""
    item = {
        "type": "object",
        "properties": {
            f"product_{number}": {"type": "string"},
            "amount": {"type": "integer", "minimum": 1},
            "kind": {"enum": ["book", "record", f"kind_{number}"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": [f"product_{number}", "amount", "kind", "note"],
        "additionalProperties": False,
    }
    properties = {
        "customer": {"type": "string"},
        "date": {"type": "string", "format": "date"},
        "items": {"type": "array", "items": item},
    }
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def source_of(number: int) -> str:
    return grammar_source(AnswerFormat(content=json_rule(schema(number))), [], PLAIN, lambda text: None)


def start_rows(instance: Instance, name: str, grammar: Grammar, num_steps: int) -> None:
    """Starts ``ROWS`` choices that decode for ``num_steps`` at least, and computes their prompts."""
    for row in range(ROWS):
        sampling = SamplingParams(seed=row, max_tokens=num_steps + 64, grammar=grammar)
        prompt = tuple(range(row + 1, row + 9))
        instance.prefill(GroupSpec(f"{name}-{row}/0", prompt, len(prompt), sampling, (ChoiceSpec(0),)))
    while sum(len(group.decodings) for group in instance.groups()) < ROWS:
        instance.step()


class MaskTimer:
    """Measures the seconds that steps spend on masks: their computation and their effect on the logits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._apply = sampler.apply_masks

    def __call__(self, logits: torch.Tensor, draws: Sequence[sampler.TokenDraw]) -> set[int]:
        begin = time.perf_counter()
        try:
            return self._apply(logits, draws)
        finally:
            self.seconds += time.perf_counter() - begin


def mask_shares(instance: Instance, grammar: Grammar, name: str, num_steps: int) -> list[tuple[float, float]]:
    """(seconds, share of masks) of each step in which all rows decode."""
    start_rows(instance, name, grammar, num_steps)
    timer, shares = MaskTimer(), list[tuple[float, float]]()
    sampler.apply_masks = timer
    try:
        for _ in range(num_steps):
            timer.seconds = 0.0
            result = instance.step()
            if len(result.tokens) == ROWS:
                shares.append((result.step_s, timer.seconds / result.step_s))
    finally:
        sampler.apply_masks = timer._apply
    for group in instance.groups():
        instance.cancel(group.spec.group_id)
    return shares


def first_use_ms(compiler: GrammarCompiler) -> list[float]:
    times = []
    for number in range(1, NUM_SCHEMAS + 1):
        begin = time.perf_counter()
        source = source_of(number)
        if error := grammar_error(source):
            raise RuntimeError(error)
        compiler.compile(source).start().allowed()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> None:
    quick: bool = parser_of(__doc__, "fewer layers and rounds").parse_args().quick
    num_layers, rounds, num_steps = (2, 2, 5) if quick else (12, 4, 12)
    shape = LlamaShape(VOCAB_SIZE, num_layers, hidden=1024, intermediate=2816)
    with tempfile.TemporaryDirectory() as folder:
        progress(f"writing a checkpoint of {shape.num_bytes >> 20} MB")
        tokenizer = large_tokenizer(VOCAB_SIZE - 1)
        model = Model(write_checkpoint(Path(folder) / "model", shape, tokenizer))
        instance = model.instance(pool_bytes=POOL_BYTES)
        begin = time.perf_counter()
        compiler = GrammarCompiler(load_decoder(tokenizer))
        tables_s = time.perf_counter() - begin
        first = first_use_ms(compiler)
        grammar = compiler.compile(source_of(0))
        mask_shares(instance, grammar, "warm", 2)
        shares = list[tuple[float, float]]()
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            shares += mask_shares(instance, grammar, f"{number}", num_steps)
        instance.close()
    step_s, fraction = (statistics.median(values) for values in zip(*shares, strict=True))
    checks = [
        Check("mask_fraction", fraction, "of a step", 0.05, f"a step of {step_s * 1e3:.0f} ms"),
        Check(
            "first_use_ms",
            statistics.median(first),
            "ms",
            50,
            f"{NUM_SCHEMAS} new schemas of {len(json.dumps(schema(0)))} bytes",
        ),
        Check("first_use_max_ms", max(first), "ms"),
        Check("tables_s", tables_s, "s"),
    ]
    finish("structured", {"rows": ROWS, "vocabulary": VOCAB_SIZE, "layers": num_layers, "hidden": shape.hidden}, checks)


if __name__ == "__main__":
    main()
