"""The comparison of answers with bills in bench/ledger_chaos.py, which shows no fault in a run without one."""

from __future__ import annotations

import pytest

from bench.ledger_chaos import BatchFiles, Outcome, Received, num_billed_wrong


def received(outcome: Outcome, request_id: str, num_tokens: int) -> Received:
    return Received("key", request_id, outcome, 10, num_tokens)


def bill(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 10, "completion_tokens": num_tokens}


def test_right_bills() -> None:
    answers = [
        received("whole", "a", 5),
        received("refused", "b", 0),
        received("broken", "c", 4),  # of which three more tokens were under way
        received("broken", "", 0),  # an answer that is not a stream
        received("unsent", "", 0),
    ]
    assert num_billed_wrong(answers, {"a": bill(5), "c": bill(7), "d": bill(9)}) == 0


@pytest.mark.parametrize(
    ("answer", "bills", "num_wrong"),
    [
        (received("whole", "a", 5), {"a": bill(6)}, 1),
        (received("whole", "a", 5), {}, 5 + 10),  # not billed at all, with its prompt
        (received("whole", "a", 5), {"a": bill(5), "b": bill(5)}, 5),  # billed twice
        (received("refused", "a", 0), {"a": bill(3)}, 3),
        (received("broken", "a", 5), {"a": bill(4)}, 1),
        (received("unsent", "", 0), {"a": bill(2)}, 2),
    ],
)
def test_wrong_bills(answer: Received, bills: dict[str, dict[str, int]], num_wrong: int) -> None:
    assert num_billed_wrong([answer], bills) == num_wrong


def test_custom_id_in_both_files_counts_twice() -> None:
    files = BatchFiles({}, [{"custom_id": "line-0"}], [{"custom_id": "line-0"}, {"custom_id": "line-1"}])
    assert files.custom_ids() == {"line-0": 2, "line-1": 1}
