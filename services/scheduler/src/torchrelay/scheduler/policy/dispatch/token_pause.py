"""Pauses between prompts, for the answers that are decoded beside them.

On an instance of both roles each answer gets one token per step, and a step full of prompts takes much longer than one
without. Where prompts follow each other without a pause, the mean time between tokens is that of a full step, and all
answers miss a target that a few steps without prompts would keep (S. Agrawal et al., "Sarathi-Serve", OSDI 2024, on
stalls of decoding; its chunks are the engine's).
"""

from __future__ import annotations

_AIM = 0.85  # of the target: answers are short, and what interrupts each is chance


def pause_s(full_step_s: float, decode_step_s: float, tbt_target_s: float) -> float:
    """For so long answers must be decoded alone after each full step of prompts, so that their tokens are in time in
    the mean; 0 where they are anyway, or never. Prompts keep half of the time at least.

    ``full_step_s``, ``decode_step_s``: of a step with these answers, full of prompts and without any.
    """
    aim_s = _AIM * tbt_target_s
    if full_step_s <= aim_s or decode_step_s >= aim_s:
        return 0.0
    num_steps = (full_step_s - aim_s) / (aim_s - decode_step_s)
    return min(num_steps * decode_step_s, full_step_s)
