from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.resource_names import check_name


@given(st.text(max_size=70))
def test_resource_names_are_checked(name: str) -> None:
    try:
        check_name(name, "model")
    except InvalidRequest as error:
        assert error.field == "model"
    else:
        assert 1 <= len(name) <= 64
        assert name.isascii() and name == name.lower()
        assert not set(name) & set("/ \t\n\\") and name not in (".", "..")
