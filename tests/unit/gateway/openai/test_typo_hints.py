from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.openai.typo_hints import is_one_edit_away, typo_hint

KNOWN = ("model", "messages", "max_tokens", "n", "stop", "top_p")


@pytest.mark.parametrize("name", ["max_token", "max_tokenss", "max_tokems", "max_tokesn", "ax_tokens", "mx_tokens"])
def test_name_one_edit_away_is_hinted(name: str) -> None:
    assert typo_hint(["model", name], KNOWN) == (name, "max_tokens")


@pytest.mark.parametrize(
    "given_",
    [
        ["model", "user", "store", "metadata", "min_tokens", "k", "m"],
        ["model", "models"],  # an extension beside the field it resembles
        ["max_tokens", "max_token"],
        list(KNOWN),
        [],
    ],
)
def test_other_names_are_not_hinted(given_: list[str]) -> None:
    assert typo_hint(given_, KNOWN) is None


def test_number_of_examined_names_is_bounded() -> None:
    assert typo_hint([*(f"name-{number}" for number in range(1000)), "max_token"], KNOWN) is None


@given(st.text(string.ascii_lowercase, max_size=8), st.integers(0, 8), st.sampled_from(string.ascii_lowercase))
def test_edit_distance_is_symmetric(name: str, place: int, letter: str) -> None:
    place = min(place, len(name))
    longer = name[:place] + letter + name[place:]
    assert is_one_edit_away(name, longer) and is_one_edit_away(longer, name)
    other = name[:place] + letter + name[place + 1 :]
    assert is_one_edit_away(name, other) == (name != other)
    assert not is_one_edit_away(name, name + "xy") and not is_one_edit_away(name, name)
