"""Audits of logs: those that a core made, in whatever order, hold; and each lie is found and named."""

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from msgspec.structs import replace

from areal_async.audit.auditor import audit_records
from areal_async.audit.report import Report
from areal_async.log.reader import Record
from areal_async.messages import AnyRecord, GroupRead, Published, SampleDone, Scored, StepDone

from .core.test_any_order import AnyOrder
from .core.world import World

TOLD_AGAIN = (SampleDone, Scored, StepDone, Published, GroupRead)


def records(world: World) -> list[AnyRecord]:
    """The log that the walk would have written. What a test told again, with its old time, is told at its own time, as
    far as that makes no difference; else it is left out."""
    found: list[AnyRecord] = [world.rules]
    at = 0.0
    for event, commands in world.log:
        if event.at < at and not isinstance(event, TOLD_AGAIN):
            continue
        found.append(replace(event, at=at) if event.at < at else event)
        at = max(at, event.at)
        found += commands
    return found


def audit(messages: Sequence[AnyRecord]) -> Report:
    return audit_records(Record(message, None, 16 + 100 * number) for number, message in enumerate(messages))


class Walk(AnyOrder):
    """Whatever happened, in whatever order: the log that it left holds."""

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            report = audit(records(self.world))
            assert report.found == {}, "\n".join(map(str, report.findings[:5]))


class WalkTrain(Walk):
    policy = "train"


class WalkMask(Walk):
    policy = "mask"


class WalkDrop(Walk):
    policy = "drop"


WALKS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)

TestWait = pytest.mark.slow(Walk.TestCase)
TestWait.settings = WALKS
TestTrain = pytest.mark.slow(WalkTrain.TestCase)
TestTrain.settings = WALKS
TestMask = pytest.mark.slow(WalkMask.TestCase)
TestMask.settings = WALKS
TestDrop = pytest.mark.slow(WalkDrop.TestCase)
TestDrop.settings = WALKS
