"""Compares two records of a copy: sources that joined and sources that were dropped."""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.scheduler.policy.types import PackCopy


def is_repair_complete(before: PackCopy | None, copy: PackCopy) -> bool:
    """Whether a repair can be reported in full; otherwise the next source is still being opened."""
    follows = any(share.following for share in copy.shares)
    return bool(sources_joined(before, copy) or (sources_dropped(before, copy) and follows))


def sources_joined(before: PackCopy | None, copy: PackCopy) -> tuple[str, ...]:
    """Sources followed now but not in ``before``. Without earlier shares the first source counts as the original."""
    known = {share.holder_id for share in before.shares if share.following} if before else set()
    following = [share.holder_id for share in copy.shares if share.following and share.holder_id not in known]
    return tuple(following if before and before.shares else following[1:])


def sources_dropped(before: PackCopy | None, copy: PackCopy) -> Mapping[str, str]:
    """Sources given up since ``before``, with the reason."""
    known = {share.holder_id: share.error for share in before.shares} if before else {}
    errors = {share.holder_id: share.error for share in copy.shares if share.error}
    return {source: error for source, error in errors.items() if known.get(source) != error}
