"""Figures of bursts under several strategies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Self

from bench.report import Check, percentile
from torchrelay.scheduler.policy.config import PolicyConfig

TPOT_TARGET_S = PolicyConfig().tbt_target_s


@dataclass(frozen=True, slots=True)
class Answer:
    """``imported_layers``: computed by a loading worker before another took the prompt over."""

    ttft_s: float
    tpot_s: float
    imported_layers: int

    def is_good(self, ttft_target_s: float) -> bool:
        """Whether the answer met both targets."""
        return self.ttft_s <= ttft_target_s and self.tpot_s <= TPOT_TARGET_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """All answers of one or more bursts."""

    answers: Sequence[Answer]

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]], imported_layers: Sequence[int]) -> Self:
        """``answers``: of the open load."""
        return cls(
            [
                Answer(
                    answer["first_at"] - answer["sent_at"],
                    (answer["last_at"] - answer["first_at"]) / max(answer["num_events"] - 1, 1),
                    num_layers,
                )
                for answer, num_layers in zip(answers, imported_layers, strict=True)
            ]
        )

    @classmethod
    def pooled(cls, outcomes: Iterable[Outcome]) -> Outcome:
        return cls([answer for outcome in outcomes for answer in outcome.answers])

    def num_good(self, ttft_target_s: float) -> int:
        return sum(answer.is_good(ttft_target_s) for answer in self.answers)

    def p(self, percent: int) -> float:
        """A percentile of the times to first token."""
        return percentile([answer.ttft_s for answer in self.answers], percent)

    @property
    def mean_ttft_s(self) -> float:
        return mean(answer.ttft_s for answer in self.answers)

    @property
    def num_moved(self) -> int:
        return sum(answer.imported_layers > 0 for answer in self.answers)

    @property
    def num_imported_layers(self) -> int:
        return sum(answer.imported_layers for answer in self.answers)

    def summary(self, ttft_target_s: float) -> str:
        return (
            f"{self.num_good(ttft_target_s)} of {len(self.answers)} in time, TTFT P50 {self.p(50):.2f} s, "
            f"P95 {self.p(95):.2f} s, mean {self.mean_ttft_s:.2f} s; {self.num_moved} prompts moved, "
            f"{self.num_imported_layers} layers imported"
        )


def checks_of(outcomes: Mapping[str, Sequence[Outcome]], ttft_target_s: float, window_s: float) -> list[Check]:
    """Figures of `live`, over the other strategies' in the same rounds."""
    pooled = {strategy: Outcome.pooled(each) for strategy, each in outcomes.items()}
    live, stop, overlap = pooled["live"], pooled["stop"], pooled["overlap"]
    seconds = window_s * len(outcomes["live"])
    good = {strategy: outcome.num_good(ttft_target_s) / seconds for strategy, outcome in pooled.items()}
    best = max(good["stop"], good["overlap"])
    goodput = ", ".join(f"{strategy} {per_s:.2f}" for strategy, per_s in good.items())
    against = f"in time per second: {goodput}"
    p95 = ", ".join(f"{strategy} {outcome.p(95):.2f}" for strategy, outcome in pooled.items())
    means = ", ".join(f"{strategy} {outcome.mean_ttft_s:.2f}" for strategy, outcome in pooled.items())
    num_live = len(live.answers)
    return [
        Check("goodput_over_best_other", good["live"] / best if best else float("nan"), "ratio", 1.0, against, True),
        Check("p95_over_stop", live.p(95) / stop.p(95), "ratio", 0.8, f"P95: {p95} s"),
        Check("p95_over_overlap", live.p(95) / overlap.p(95), "ratio", None, "of the same rounds"),
        Check("mean_over_stop", live.mean_ttft_s / stop.mean_ttft_s, "ratio", None, f"mean: {means} s"),
        Check("mean_over_overlap", live.mean_ttft_s / overlap.mean_ttft_s, "ratio", None, "of the same rounds"),
        Check("prompts_moved", live.num_moved, "prompts", None, f"of {num_live}"),
        Check("layers_imported", live.num_imported_layers, "layers", None, "computed by loading workers"),
    ]
