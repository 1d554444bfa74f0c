"""All orders of small runs: every answer may come at every moment, and from each state the end must be reachable.

The states are those that differ in what the core could do next; the world checks its rules on every step.
"""

import copy
from collections.abc import Hashable

import pytest

from areal_async.messages import Finish

from .checkpoints import BACK
from .world import World, make_rules

CASES = [
    # when_older, batch_groups, η, servers, steps, outcomes of a sample, rollbacks
    ("wait", 1, 0, 1, 3, (1.0, "failed"), 1),
    ("wait", 1, 1, 1, 3, (1.0,), 1),
    ("wait", 1, 2, 1, 3, (1.0,), 0),
    ("wait", 1, 1, 2, 3, (1.0,), 0),
    ("wait", 2, 0, 1, 2, (1.0, "failed"), 0),
    pytest.param("wait", 2, 1, 1, 2, (1.0,), 1, marks=pytest.mark.slow),
    pytest.param("wait", 2, 1, 2, 2, (1.0,), 0, marks=pytest.mark.slow),
    pytest.param("train", 1, 1, 1, 3, (1.0,), 1, marks=pytest.mark.slow),
    ("mask", 1, 1, 1, 3, (1.0,), 1),
    ("drop", 1, 1, 1, 3, (1.0, "failed"), 1),
    pytest.param("drop", 1, 1, 2, 3, (1.0,), 0, marks=pytest.mark.slow),
    pytest.param("requeue", 1, 1, 1, 3, (1.0,), 1, marks=pytest.mark.slow),
    pytest.param("requeue", 1, 1, 2, 3, (1.0,), 0, marks=pytest.mark.slow),
]


def look(world: World) -> Hashable:
    """What decides how the run may go on (times and stories don't)."""
    parts = world.core._parts
    ledger, fleet, trainer = parts.ledger, parts.fleet, parts.trainer
    return (
        tuple(sorted(world.pending)),
        tuple(
            (group.id, group.position, group.state, group.floor, tuple((s.state, s.attempt) for s in group.samples))
            for group in ledger.groups.values()
        ),
        tuple((server.branch, server.version, server.loading, server.load) for server in fleet.servers.values()),
        (fleet.newest, trainer.returns, trainer.state, trainer.version, trainer.branch, ledger.step, world.end),
    )


@pytest.mark.parametrize(("policy", "batch", "eta", "servers", "steps", "outcomes", "rollbacks"), CASES)
def test_every_order_keeps_the_rules_and_reaches_the_end(
    policy: str, batch: int, eta: int, servers: int, steps: int, outcomes: tuple[float | str, ...], rollbacks: int
) -> None:
    age = {"when_older": "drop", "requeue": True} if policy == "requeue" else {"when_older": policy}
    back = BACK | {"checkpoint_steps": 2} if rollbacks else {}
    rules = make_rules(batch_groups=batch, max_staleness=eta, steps=steps, retries=0, max_failures=2, **age, **back)
    start = World(rules, servers=servers, prompts=batch * steps + 2).start()
    seen = {look(start)}
    waiting = [start]
    ends = stale = old = 0
    while waiting:
        world = waiting.pop()
        if world.end is not None:
            ends += 1
            assert isinstance(world.end, Finish) or "max_failures" in world.end.why
            continue
        assert world.pending, f"stuck: {world.core.waiting(world.clock)}"
        branches = [(key, outcome) for key in world.pending for outcome in (outcomes if key[0] == "sample" else (1.0,))]
        backs = world.checkpoints.points if world.branch < rollbacks and world.find("train") else ()
        for number in range(len(branches) + len(backs)):
            other = copy.deepcopy(world, {id(command): command for command in world.pending.values()})
            if number < len(branches):
                other.answer(*branches[number])
            else:
                other.roll_back(backs[number - len(branches)])
            # nobody reads them here, and they would be copied
            other.commands, other.told, other.late, other.log = [], [], [], []
            stale += other.fates("stale")
            old += sum(train.step - other.done[s.sample].oldest > eta for train in other.history for s in train.samples)
            key = look(other)
            if key not in seen:
                seen.add(key)
                waiting.append(other)
    assert ends > 0
    assert len(seen) > 50
    assert (stale > 0) == (rules.when_older == "drop")
    assert (old > 0) == (policy in ("train", "mask"))
