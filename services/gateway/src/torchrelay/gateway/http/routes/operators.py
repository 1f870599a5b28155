"""/v1/operators: the people who run the platform."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from torchrelay.gateway.auth.operators import Operator
from torchrelay.gateway.core import Role
from torchrelay.gateway.http.dependencies import Admin, Owner, ServicesOf

router = APIRouter(prefix="/v1/operators")


class RoleChange(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Role


class NewOperator(RoleChange):
    name: str


@router.post("", status_code=201)
async def create(services: ServicesOf, _admin: Owner, body: NewOperator) -> dict[str, Any]:
    operator, token = await services.operators.create(body.name, body.role)
    return {**_shown(operator), "key": token}


@router.get("")
async def all_operators(services: ServicesOf, _admin: Admin) -> dict[str, Any]:
    return {"object": "list", "data": [_shown(each) for each in await services.operators.list()]}


@router.patch("/{name}")
async def change(services: ServicesOf, _admin: Owner, name: str, body: RoleChange) -> dict[str, Any]:
    return _shown(await services.operators.change(name, body.role))


@router.delete("/{name}", status_code=204)
async def revoke(services: ServicesOf, _admin: Owner, name: str) -> None:
    await services.operators.revoke(name)


def _shown(operator: Operator) -> dict[str, Any]:
    return {
        "id": operator.operator_id,
        "object": "operator",
        "name": operator.name,
        "role": operator.role,
        "created": operator.created_unix_us // 1_000_000,
        "revoked": operator.is_revoked,
    }
