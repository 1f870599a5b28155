"""Errors of pydantic, counts, sizes and durations in plain words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from torchrelay.common.quantities import format_bytes, format_count, format_duration
from torchrelay.common.validation import describe_error, quote_value


class Row(BaseModel):
    size: int = Field(1, ge=0)


class Given(BaseModel, extra="forbid"):
    name: Annotated[str, Field(min_length=1, max_length=5)] = "x"
    whole: Annotated[int, Field(gt=0, lt=10)] = 1
    part: Annotated[float, Field(le=2, allow_inf_nan=False)] = 1.0
    really: bool = True
    rows: list[Row] = Field([Row()], min_length=1, max_length=2)
    kind: Literal["key", "model"] = "key"
    even: int = 2

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("3 is odd.")
        return value


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"whole": "ten"}, "whole must be an integer, not 'ten'"),
        ({"whole": 1.5}, "whole must be an integer, not 1.5"),
        ({"whole": None}, "whole must be an integer, not null"),
        ({"whole": 0}, "whole must be above 0, not 0"),
        ({"whole": 10}, "whole must be below 10, not 10"),
        ({"part": "hot"}, "part must be a number, not 'hot'"),
        ({"part": float("nan")}, "part must be a finite number, not NaN"),
        ({"whole": 10**60}, f"whole must be below 10, not 1{'0' * 36}..."),
        ({"part": "9"}, "part must be at most 2.0, not 9"),
        ({"really": "so"}, "really must be true or false, not 'so'"),
        ({"name": 5}, "name must be a string, not 5"),
        ({"name": ["a"]}, "name must be a string, not a list"),
        ({"name": ""}, "name must not be empty"),
        ({"rows": {}}, "rows must be a list, not an object"),
        ({"name": "letters"}, "name must be at most 5 characters long, not 'letters'"),
        ({"rows": []}, "rows must not be empty"),
        ({"rows": [{}] * 3}, "rows must be at most 2 entries long, not a list"),
        ({"rows": [1]}, "rows.0 must be an object, not 1"),
        ({"rows": [{"size": -1}]}, "rows.0.size must be at least 0, not -1"),
        ({"kind": "moon"}, "kind must be 'key' or 'model', not 'moon'"),
        ({"more": 1}, "more is not a recognized field"),
        ({"even": 3}, "even: 3 is odd"),
        ([], "must be an object, not an empty list"),
    ],
)
def test_error_names_field_requirement_and_value(given: Any, sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Given.model_validate(given)
    (fault,) = caught.value.errors()
    assert describe_error(".".join(map(str, fault["loc"])), fault) == sentence


def test_long_value_is_truncated() -> None:
    assert quote_value("x" * 41) == f"'{'x' * 37}...'" and quote_value("x" * 40) == f"'{'x' * 40}'"
    assert (quote_value(True), quote_value([1])) == ("true", "a list")


def test_counts_sizes_and_durations_have_three_digits() -> None:
    counts = {0: "0 chunks", 1: "1 chunk", 2: "2 chunks", 12_000: "12,000 chunks"}
    assert {number: format_count(number, "chunk") for number in counts} == counts
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 1536: "1.54 kB", 999_600: "1 MB", 4.29e9: "4.29 GB", 2.5e13: "25 TB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
    durations = {0: "0 ms", 0.0054: "5.4 ms", 0.9996: "1 s", 9.94: "9.94 s", 99.46: "99.5 s", 1234.4: "20.6 min"}
    durations |= {180: "180 s", 259_200: "72 h"}
    assert {seconds: format_duration(seconds) for seconds in durations} == durations
