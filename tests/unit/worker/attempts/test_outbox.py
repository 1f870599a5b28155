"""The messages of a gateway's stream: all outputs since the last message, and beats."""

from __future__ import annotations

from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1.types_pb2 import EngineProgress
from torchrelay.worker.attempts.outbox import Outbox


async def test_last_beat_is_sent_alone_or_with_outputs() -> None:
    outbox = Outbox("gw")
    outbox.put_beat(EngineProgress(num_advances=1))
    assert await outbox.take() == pb.StepOutput(beat=EngineProgress(num_advances=1))
    outbox.put([pb.ChoiceOutput(choice=0)])
    outbox.put_beat(EngineProgress(num_advances=2))
    outbox.put_beat(EngineProgress(num_advances=3))
    taken = await outbox.take()
    assert taken == pb.StepOutput(outputs=[pb.ChoiceOutput(choice=0)], beat=EngineProgress(num_advances=3))
    outbox.put([pb.ChoiceOutput(choice=1)])
    assert not (await outbox.take()).HasField("beat")
