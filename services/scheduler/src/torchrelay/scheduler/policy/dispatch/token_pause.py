"""Pauses between prompts, for the answers that the same instance decodes.

On an instance with both roles each answer gets one token per step, and a step full of prompts takes much longer than a
step without. If prompts follow each other without a pause, the mean time between tokens is that of a full step, and all
answers miss a target that a few steps without prompts would meet (S. Agrawal et al., "Sarathi-Serve", OSDI 2024, on
stalls of decoding; its chunks are the engine's).
"""

from __future__ import annotations

_AIM = 0.85  # aim as a share of the target: answers are short, and their interruptions are random


def pause_s(full_step_s: float, decode_step_s: float, tbt_target_s: float) -> float:
    """Time to decode answers alone after each full step of prompts so that the mean time between their tokens meets the
    target; 0 if it does so anyway, or cannot. Prompts get at least half of the time.

    ``full_step_s``, ``decode_step_s``: times of a step with these answers, full of prompts and without any.
    """
    aim_s = _AIM * tbt_target_s
    if full_step_s <= aim_s or decode_step_s >= aim_s:
        return 0.0
    num_steps = (full_step_s - aim_s) / (aim_s - decode_step_s)
    return min(num_steps * decode_step_s, full_step_s)
