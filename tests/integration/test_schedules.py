"""A schedule from the operator's REST call to the instances that the scheduler loads for it."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.support.wait import eventually
from tests.unit.gateway.conftest import database, parts, sqlite_template  # noqa: F401  (fixtures)
from tests.unit.gateway.http.conftest import RestRig, database_url, rig  # noqa: F401
from tests.unit.gateway.http.routes.test_uploads import published
from tests.unit.gateway.inference.execution.test_admission_stream import admissions_to, scheduler
from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_store, a_worker
from torchrelay.gateway.background import background
from torchrelay.gateway.inference.execution.minimums import announce_minimums
from torchrelay.scheduler.policy.inputs import MinimumsSet
from torchrelay.scheduler.service.converters import model_from_proto

BEFORE = datetime(2026, 11, 25, 6, 59, 0, tzinfo=UTC).timestamp()  # a Wednesday, 07:59 in Berlin


async def test_schedule_set_over_rest_loads_and_releases_instances(rig: RestRig) -> None:  # noqa: F811
    await published(rig.acme)
    settings = {"schedule": ["mon-fri 08:00-09:00 Europe/Berlin = 2"], "idle_timeout_s": 30}
    assert (await rig.admin.patch("/v1/models/acme/glossary", json=settings)).status_code == 200
    async with scheduler() as made, admissions_to(made.address) as admissions:
        announcing = announce_minimums(rig.parts.catalog.with_minimum, admissions, 60.0, lambda: BEFORE)
        async with background(announcing):
            await eventually(lambda: bool(made.minimums))
    (model,) = map(model_from_proto, made.minimums[-1].versions)

    scene = PaperCluster(now=BEFORE - 10.0)
    scene.settle(a_store("store-1", "host-1"), *(a_worker(f"w-{n}") for n in range(3)))
    scene.models[model.version_id] = model
    scene.apply(MinimumsSet((model,)))
    scene.pass_time(BEFORE + 50.0 - scene.now)
    assert scene.loads() == [], "ten seconds are more than its load takes"
    scene.pass_time(10.0)
    scene.finish_loads()
    assert len(list(scene.policy.state.instances)) == 2 and scene.now == BEFORE + 60.0, "it is eight o'clock"
    scene.pass_time(3599.0, step_s=2.5)
    assert len(list(scene.policy.state.instances)) == 2
    scene.pass_time(35.0)
    assert list(scene.policy.state.instances) == []
