"""Values of fields on every route: whole numbers may have a decimal point; unusable text is refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.http.conftest import RestRig
from tests.unit.gateway.http.routes.test_uploads import published

PRICE = {"prompt_nano": 1, "cached_nano": 1, "output_nano": 1}
FILE = {"path": "w", "size": 1, "sha256": "0" * 64}
FIELDS: list[tuple[str, str, dict[str, Any], str]] = [
    *[("PUT", "/v1/prices", PRICE, name) for name in PRICE],
    ("POST", "/v1/keys", {"tenant": "acme"}, "requests_per_minute"),
    ("PATCH", "/v1/tenants/acme", {}, "budget_nano"),
    ("PATCH", "/v1/tenants/acme", {}, "storage_quota_bytes"),
    ("PATCH", "/v1/models/acme/glossary", {}, "max_instances"),
    ("PATCH", "/v1/models/acme/glossary", {}, "min_instances"),
]


async def test_whole_numbers_are_integers_and_others_are_refused(rig: RestRig, subtests: pytest.Subtests) -> None:
    made = await rig.acme.post("/v1/uploads", json={"model": "m", "files": [{**FILE, "size": 9.0}]})
    assert (made.status_code, made.json()["files"][0]["size"]) == (201, 9)
    refused = await rig.acme.post("/v1/uploads", json={"model": "m", "files": [{**FILE, "size": 9.5}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "files.0.size")
    await published(rig.acme)
    for method, path, body, name in FIELDS:
        with subtests.test(f"{path} {name}"):
            reply = await rig.admin.request(method, path, json={**body, name: 4.0})
            assert reply.status_code in (200, 201)
            value = reply.json()[name]
            assert (value, type(value)) == (4, int)
            for wrong in (4.5, "4", False, True):
                refused = await rig.admin.request(method, path, json={**body, name: wrong})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("character", [r"\ud800", r"\u0000"])
async def test_every_rest_route_names_the_field_with_unusable_text(rig: RestRig, character: str) -> None:
    for method, path, field in (
        ("POST", "/v1/keys", "name"),
        ("POST", "/v1/tenants", "name"),
        ("PUT", "/v1/prices", "model"),
        ("PATCH", "/v1/models/acme/m", "schedule"),
        ("POST", "/v1/uploads", "model"),
    ):
        content, is_json = f'{{"{field}": "a{character}"}}', {"content-type": "application/json"}
        answer = await rig.admin.request(method, path, content=content, headers=is_json)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_nul_in_path_or_query_is_refused(rig: RestRig) -> None:
    for path in ("/v1/usage?model=a%00b", "/v1/models/a%00b", "/v1/requests/req-%00/explain"):
        answer = await rig.acme.get(path)
        assert answer.status_code in (400, 404), answer.text
