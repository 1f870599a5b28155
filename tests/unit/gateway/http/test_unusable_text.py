"""REST routes refuse lone surrogates and NUL characters by the field that has them."""

from __future__ import annotations

import pytest

from tests.unit.gateway.http.conftest import RestRig

JSON = {"content-type": "application/json"}
ROUTES = [
    ("POST", "/v1/keys", "name"),
    ("POST", "/v1/tenants", "name"),
    ("PUT", "/v1/prices", "model"),
    ("PATCH", "/v1/models/acme/m", "schedule"),
    ("POST", "/v1/uploads", "model"),
]


@pytest.mark.parametrize(("method", "path", "field"), ROUTES)
@pytest.mark.parametrize("character", [r"\ud800", r"\u0000"])
async def test_every_rest_route_names_the_field(
    rig: RestRig, method: str, path: str, field: str, character: str
) -> None:
    content = f'{{"{field}": "a{character}"}}'
    answer = await rig.admin.request(method, path, content=content, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_nul_in_path_or_query_is_refused(rig: RestRig) -> None:
    for path in ("/v1/usage?model=a%00b", "/v1/models/a%00b", "/v1/requests/req-%00/explain"):
        answer = await rig.acme.get(path)
        assert answer.status_code in (400, 404), answer.text
