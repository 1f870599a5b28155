"""Content that no model here reads: agents keep images in their history, and every later request has them.

A remark takes its place, so that the conversation goes on, and a header of the answer names what was left out.
"""

from __future__ import annotations

from typing import Final

_KINDS: Final = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file", "container_upload"), "file"),
    **dict.fromkeys(("input_audio", "audio", "audio_url"), "audio"),
    **dict.fromkeys(("video_url", "input_video"), "video"),
}


def remark(content_type: str, left_out: set[str]) -> str | None:
    """The text in the place of content of this type, whose kind is added to ``left_out``; None for other types."""
    kind = _KINDS.get(content_type)
    if kind is None:
        return None
    left_out.add(kind)
    return f"[{kind} left out: this model reads text only]"
