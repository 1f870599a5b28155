from __future__ import annotations

import pytest

from torchrelay.common.host.labels import MAX_LABELS, checked_labels


def test_labels_are_sorted_and_distinct() -> None:
    assert checked_labels(["zone=a", "gpu=l4", "zone=a"]) == ["gpu=l4", "zone=a"]
    assert checked_labels(["kubernetes.io/arch=amd64"]) == ["kubernetes.io/arch=amd64"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["zone"], "'zone' is not a label; write KEY=VALUE"),
        (["zone=a,b"], "is not a label"),
        (["=a"], "is not a label"),
        (["zone=a", "zone=b"], "zone has two values"),
        ([f"k{number}=v" for number in range(MAX_LABELS + 1)], "at most 16 labels, not 17"),
    ],
)
def test_other_texts_are_refused(labels: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_labels(labels)
