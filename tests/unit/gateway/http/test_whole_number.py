"""Integers may be written with a decimal point on every route; fractions, booleans and strings are refused."""

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


@pytest.mark.parametrize(("method", "path", "body", "name"), FIELDS, ids=[f"{each[1]} {each[3]}" for each in FIELDS])
async def test_whole_numbers_are_integers_and_others_are_refused(
    rig: RestRig, method: str, path: str, body: dict[str, Any], name: str
) -> None:
    await published(rig.acme)
    reply = await rig.admin.request(method, path, json={**body, name: 4.0})
    assert reply.status_code in (200, 201)
    value = reply.json()[name]
    assert (value, type(value)) == (4, int)
    for wrong in (4.5, "4", False, True):
        refused = await rig.admin.request(method, path, json={**body, name: wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_size_of_a_file_may_have_a_decimal_point(rig: RestRig) -> None:
    made = await rig.acme.post("/v1/uploads", json={"model": "m", "files": [{**FILE, "size": 9.0}]})
    assert (made.status_code, made.json()["files"][0]["size"]) == (201, 9)
    refused = await rig.acme.post("/v1/uploads", json={"model": "m", "files": [{**FILE, "size": 9.5}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "files.0.size")
