"""Whole runs with a script: the cases that broke other systems (numbers of the list of cases), and ends of runs."""

import math

import pytest
from msgspec.structs import replace

from areal_async.core import admission
from areal_async.errors import IllegalTransition
from areal_async.messages import (
    Cancel,
    Fail,
    Failed,
    Finish,
    Forget,
    Joined,
    Lost,
    Publish,
    ReadGroup,
    SampleDone,
    StartSample,
    StepDone,
    StopRequested,
    Swap,
    Swapped,
    Train,
)

from .checkpoints import BACK
from .world import World, make_rules

EARLY = ("publish", "swap")


def admitted(world: World) -> int:
    return sum(isinstance(command, ReadGroup) for command in world.commands)


def train_one(world: World) -> None:
    """Everything is generated, one step is trained, every server gets its weights."""
    world.settle("read", "sample", "score")
    (key,) = world.find("train")
    world.answer(key)
    world.settle(*EARLY)


def test_p01_exactly_as_many_groups_as_the_bound_allows() -> None:
    world = World(make_rules(batch_groups=8, steps=100)).start()
    assert admitted(world) == 0  # no server holds version 0 yet
    world.settle(*EARLY)
    assert admitted(world) == 16
    train_one(world)
    assert admitted(world) == 24


def test_p01_what_is_subtracted_from_what() -> None:
    rules = make_rules(max_staleness=1)  # lag = step - version of the oldest token; the bound itself is allowed
    assert admission.deadline(3, rules) >= 4
    assert admission.deadline(2, rules) < 4


def test_p02_capacity_after_a_restart_counts_from_the_version() -> None:
    world = World(make_rules(batch_groups=8, steps=200)).start(version=100).settle(*EARLY)
    assert admitted(world) == 16
    assert world.core.step == 100


def test_p04_a_rejected_group_gives_its_place_back_at_once() -> None:
    world = World(make_rules(batch_groups=8, steps=100, max_filtered=2000)).start().settle(*EARLY)
    world.settle("read", "sample")
    for count, key in enumerate(world.find("score")[:10]):
        world.answer(key, None)
        assert admitted(world) == 16 + count + 1
    for _ in range(1000):
        world.settle("read", "sample")
        world.answer(world.find("score")[0], None)
    assert world.core.balance()["outstanding"] == 16
    assert world.core.balance()["filtered"] == 1010
    assert isinstance(world.run_out(), Finish)


def test_p05_places_are_counted_by_state_and_refilled_at_once() -> None:
    rules = make_rules(batch_groups=64, max_concurrent=70, max_staleness=50, steps=100)
    world = World(rules).start().settle(*EARLY)
    first = world.find("read")
    assert len(first) == 70
    for key in first:
        world.answer(key)
    assert len(world.find("sample")) == 70
    last = len(world.commands)
    for key in world.find("sample"):
        world.answer(key)  # each one that ends makes room for another
    assert sum(isinstance(c, ReadGroup) for c in world.commands[last:]) == 70
    world.settle("score")
    assert world.core.balance()["training"] == 64
    assert world.core.balance()["outstanding"] == 6 + 70


def test_p07_nothing_is_dropped_while_the_trainer_is_busy() -> None:
    world = World(make_rules(batch_groups=50, max_concurrent=2000, max_staleness=30, steps=30)).start().settle(*EARLY)
    world.settle("read", "sample", "score")  # the balance is checked after every event
    balance = world.core.balance()
    assert balance["admitted"] == 1500
    assert balance["training"] == 50
    assert balance["outstanding"] == 1450
    assert isinstance(world.run_out(), Finish)
    assert world.core.balance()["trained"] == 1500


def test_p08_after_going_back_every_prompt_is_trained_once() -> None:
    world = World(make_rules(batch_groups=2, steps=10, **BACK), prompts=8).start().settle(*EARLY)
    world.settle("read", "sample", "score")
    world.answer(world.find("train")[0])
    world.settle("publish")
    assert world.find("train")  # step 1 is under way with prompts 2 and 3 when the trainer dies
    world.roll_back(to=1)
    end = world.run_out()
    assert end == Finish(reason="data_ended")
    positions = [world.groups[group].position for train in world.history for group in train.groups]
    assert positions == list(range(8))


def test_p10_a_failed_sample_is_tried_again_by_itself() -> None:
    world = World(make_rules(batch_groups=1, group_size=8, min_group=8, steps=1)).start().settle(*EARLY, "read")
    world.answer(("sample", "0.3", "0"), "failed")
    assert ("sample", "0.3", "1") in world.pending
    assert world.run_out() == Finish(reason="steps_done")
    assert world.core.balance()["trained"] == 1


def test_p10_when_everything_fails_the_run_stops_with_the_first_error() -> None:
    world = World(make_rules(group_size=4, min_group=4, retries=2, max_failures=1, steps=1)).start()
    end = world.run_out(outcome="failed")
    assert isinstance(end, Fail)
    assert "boom" in end.why
    assert "group 0 (position 0): sample 0." in end.why
    assert "raise rollout.max_failures" in end.why
    assert max(int(key.attempt) for key in world.commands if isinstance(key, StartSample)) == 2


def test_p12_a_member_without_a_reward_is_left_out() -> None:
    world = World(make_rules(batch_groups=1, group_size=4, steps=1)).start().settle(*EARLY, "read", "sample")
    for member, reward in enumerate([1.0, math.nan, 0.0, 1.0]):
        world.answer(("score", f"0.{member}", "0"), reward)
    (train,) = (command for command in world.commands if isinstance(command, Train))
    assert [sample.sample for sample in train.samples] == ["0.0", "0.2", "0.3"]
    assert all(math.isfinite(sample.advantage) for sample in train.samples)
    assert Forget(samples=("0.1",)) in world.commands
    assert isinstance(world.run_out(), Finish)


def test_p12_equal_rewards_are_trained_with_advantage_zero_or_filtered() -> None:
    kept = World(make_rules(batch_groups=1, group_size=4, steps=1)).start()
    kept.run_out()
    (train,) = kept.history
    assert [sample.advantage for sample in train.samples] == [0.0] * 4
    dropped = World(make_rules(batch_groups=1, group_size=4, steps=1, drop_equal=True), prompts=20).start()
    assert dropped.run_out() == Finish(reason="data_ended")
    assert dropped.core.balance()["filtered"] == 20


def test_p12_sampling_again_is_bounded() -> None:
    """Every group has equal rewards and is filtered; the one over `max_filtered` ends the run, with the reason."""
    world = World(make_rules(drop_equal=True, max_filtered=30)).start()
    end = world.run_out()
    assert isinstance(end, Fail)
    assert "31 groups in a row were filtered, and rollout.max_filtered is 30" in end.why
    assert "all 1 rewards are equal" in end.why


def test_a_straggler_makes_the_batch_test_wait_and_is_named() -> None:
    """B = 2, η = 1. Group 0 (floor 0) is slow: step 0 goes without it, step 1 is its last, so step 1 waits."""
    world = World(make_rules(steps=5)).start().settle(*EARLY, "read")
    for number in (1, 2, 3):
        world.answer(("sample", f"{number}.0", "0"))
    world.settle("score", "train", *EARLY, "read")
    assert world.core.step == 1
    for number in (4, 5):
        world.answer(("sample", f"{number}.0", "0"))
    world.settle("score")
    assert world.core.balance()["outstanding"] == 4
    assert not world.find("train")  # three groups are ready, two would do: but group 0 would be too old in step 2
    words = "step 1 waits for group 0 (floor 0, deadline 1) <- sample 0.0 on server server0, for 18.0 s"
    assert world.core.waiting(world.clock) == words
    world.answer(("sample", "0.0", "0"))
    assert "the check of sample 0.0" in world.core.waiting(world.clock)
    world.settle("score")
    (train,) = (command for command in world.commands if isinstance(command, Train) and command.step == 1)
    assert train.groups == (0, 3)
    assert isinstance(world.run_out(), Finish)


def test_waiting_says_who_is_missing() -> None:
    world = World(make_rules())
    assert "trainer's ranks" in world.core.waiting(world.clock)
    world.start()
    assert "publishes version 0" in world.core.waiting(world.clock)
    world.settle("publish")
    assert "no server holds version 0 yet: server server0 (updating)" in world.core.waiting(world.clock)
    world.settle("swap")
    assert world.core.waiting(world.clock).startswith(
        "step 0 waits for 2 more ready groups: group 0 (floor 0, deadline 1) <- its"
    )
    assert "and 1 more" in world.core.waiting(world.clock)
    world.settle("read", "sample", "score")
    assert "trains step 0" in world.core.waiting(world.clock)
    world.run_out()
    assert world.core.waiting(world.clock) == "the run is over: steps_done"


def test_without_staleness_it_is_a_plain_loop() -> None:
    """η = 0: step i trains prompts i·B ... i·B + B - 1 in this order, all sampled from version i."""
    for order in range(5):
        world = World(make_rules(max_staleness=0, batch_groups=3, group_size=2, steps=4), servers=2).start()
        assert world.run_out(order) == Finish(reason="steps_done")
        assert [train.groups for train in world.history] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
        for train in world.history:
            assert [world.groups[group].position for group in train.groups] == list(train.groups)
            assert {world.done[sample.sample].oldest for sample in train.samples} == {train.step}


def test_minibatches_are_the_same_for_the_same_seed() -> None:
    rules = make_rules(max_staleness=0, batch_groups=8, minibatches=4, group_size=2, steps=3)
    runs = []
    for order in (0, 3):
        world = World(rules).start()
        world.run_out(order)
        runs.append([train.minibatches for train in world.history])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]  # each step has an order of its own


def test_a_stop_finishes_the_step_that_is_running() -> None:
    world = World(make_rules()).start().settle(*EARLY, "read", "sample", "score")
    world.send(StopRequested(at=world.tick()))
    assert world.end is None
    world.settle("train")
    assert world.end is None
    world.settle("publish")
    assert world.end == Finish(reason="stopped")
    assert world.core.balance()["trained"] == 2


def test_a_stop_before_anything_began() -> None:
    world = World(make_rules())
    world.send(StopRequested(at=1.0))
    assert world.end == Finish(reason="stopped")
    assert world.core.handle(Joined(at=2.0, peer="trainer", id="trainer")) == []


@pytest.mark.parametrize("back", [{}, BACK])
def test_a_stop_ends_what_is_in_flight(back: dict[str, object]) -> None:
    world = World(make_rules(**back)).start().settle(*EARLY)
    train_one(world)  # with the first one's room, groups 4 and 5 are admitted; 2 and 3 are trained
    world.settle("read")
    world.send(StopRequested(at=world.tick()))
    world.settle("train", "publish")
    assert [type(command) for command in world.commands[-3:]] == [Cancel, Cancel, Finish]
    assert world.core.balance()["outstanding" if back else "cancelled"] == 2  # a resume goes on with them


def test_a_lost_trainer_ends_the_run_with_its_story() -> None:
    world = World(make_rules()).start().settle(*EARLY)
    world.send(Lost(at=world.tick(), peer="trainer", id="trainer", why="exit code -9"))
    assert isinstance(world.end, Fail)
    assert "trainer is gone at step 0: exit code -9" in world.end.why


@pytest.mark.parametrize(("of", "id"), [("publish", "0"), ("train", "0")])
def test_what_the_run_needs_and_fails_ends_it(of: str, id: str) -> None:
    world = World(make_rules()).start()
    for kind in ("publish", "swap", "read", "sample", "score"):
        if world.find(of):
            break
        world.settle(kind)
    world.send(Failed(at=world.tick(), of=of, id=id, why="no"))  # type: ignore[arg-type]
    assert isinstance(world.end, Fail)
    assert f"the trainer is gone at step {world.core.step}: {of} {id} failed" in world.end.why


def test_a_refused_prompt_counts_as_a_failure_and_frees_its_place() -> None:
    world = World(make_rules(max_failures=1)).start().settle(*EARLY)
    commands = world.answer(("read", "0"), "refused")
    assert [type(command) for command in commands] == [ReadGroup]
    world.answer(("read", "1"), "refused")
    assert isinstance(world.end, Fail)
    assert "2 groups failed (2 of them for their prompt)" in world.end.why
    assert "its prompt can't be used: too long" in world.end.why


def test_a_group_trains_with_fewer_members_where_that_is_allowed() -> None:
    world = World(make_rules(batch_groups=1, group_size=4, min_group=2, retries=0, steps=1)).start()
    world.settle(*EARLY, "read")
    for member in (0, 1):
        world.answer(("sample", f"0.{member}", "0"), "failed")
    assert world.run_out() == Finish(reason="steps_done")
    assert [sample.sample for sample in world.history[0].samples] == ["0.2", "0.3"]


def test_a_hopeless_group_is_cancelled_without_waiting_for_the_rest() -> None:
    world = World(make_rules(batch_groups=1, group_size=4, min_group=3, retries=0, max_failures=1, steps=1)).start()
    world.settle(*EARLY, "read")
    world.answer(("sample", "0.0", "0"))
    world.answer(("sample", "0.1", "0"), "failed")
    commands = world.answer(("sample", "0.2", "0"), "failed")
    assert Cancel(sample="0.0", attempt=0) in commands
    assert Cancel(sample="0.3", attempt=0) in commands
    assert Forget(samples=("0.0",)) in commands
    assert world.run_out() == Finish(reason="steps_done")


def test_servers_swap_in_waves_the_oldest_first_and_memory_is_freed() -> None:
    world = World(make_rules(batch_groups=1, max_staleness=9, steps=9, wave=2), servers=5).start().settle("publish")
    assert len(world.find("swap")) == 2
    world.settle("swap", "read", "sample", "score")
    world.answer(world.find("train")[0])
    world.settle("publish", "train")  # training goes on although no server has swapped since
    publishes = [command for command in world.commands if isinstance(command, Publish)]
    assert len(publishes) > 3
    freed = [version for command in publishes for version in command.free]
    assert len(freed) == len(set(freed))
    assert 1 not in freed  # two servers still load it
    while len({book.holds for book in world.servers.values()}) > 1 and world.end is None:
        world.settle("swap")
    assert all(isinstance(command, Swap) for command in world.pending.values() if isinstance(command, Swap))


def test_going_back_trains_the_same_batches_on_a_new_branch() -> None:
    world = World(make_rules(steps=6, batch_groups=2, minibatches=2, **BACK), servers=2).start()
    for _ in range(3):
        world.settle("publish", "swap", "read", "sample", "score")
        world.answer(world.find("train")[0])
    before = list(world.history)
    commands = world.roll_back(to=1)
    assert Publish(version=1, branch=1, free=commands[-1].free) == commands[-1]  # type: ignore[union-attr]
    assert world.core.balance()["trained"] == 2
    assert world.core.balance()["training"] == 4
    for event in world.late:  # what the dead trainer still says changes nothing
        assert world.send(event) == []
    assert world.run_out() == Finish(reason="steps_done")
    assert world.history[:3] == before
    replayed = [c for c in world.commands if isinstance(c, Train) and c.branch == 1]
    assert [train.step for train in replayed] == [1, 2, 3, 4, 5]


def test_nothing_is_placed_on_a_server_of_an_older_branch() -> None:
    world = World(make_rules(steps=6, max_staleness=3, **BACK), servers=1).start().settle(*EARLY)
    for _ in range(2):
        train_one(world)
    before = admitted(world)
    cancelled = [world.groups[int(number)].position for _, number in world.find("read")]
    world.roll_back(to=2)
    world.settle("publish")
    assert admitted(world) == before  # the server still holds version 2 of branch 0
    world.settle("swap")
    again = [command.position for command in world.commands if isinstance(command, ReadGroup)][before:]
    assert again == cancelled == [10, 11]  # the same prompts, before any new one
    assert isinstance(world.run_out(), Finish)


def test_events_that_were_never_asked_for_are_errors_with_a_story() -> None:
    world = World(make_rules()).start().settle(*EARLY, "read")
    done = SampleDone(
        at=9.0, sample="99.0", attempt=0, oldest=0, newest=0, prompt_tokens=1, length=1, loss_tokens=1, finish="stop"
    )
    with pytest.raises(IllegalTransition, match=r"sample 99\.0, but there never was one"):
        world.core.handle(done)
    with pytest.raises(
        IllegalTransition, match=r"(?s)attempt 3 of sample 0\.0, which is in attempt 0.*on server server0"
    ):
        world.core.handle(Failed(at=9.0, of="sample", id="0.0", attempt=3, why="?"))
    with pytest.raises(IllegalTransition, match="server nine, which never joined"):
        world.core.handle(Swapped(at=9.0, server="nine", version=0, branch=0, pause_s=0.0))
    with pytest.raises(IllegalTransition, match="not told to train step 0"):
        world.core.handle(StepDone(at=9.0, step=0, branch=0, metrics={}))
    with pytest.raises(IllegalTransition, match="joined twice"):
        world.core.handle(Joined(at=9.0, peer="server", id="server0"))


def test_a_token_older_than_the_floor_ends_the_run() -> None:
    world = World(make_rules(steps=5)).start().settle(*EARLY)
    train_one(world)
    world.settle("read")
    name, attempt = world.find("sample")[-1][1:]
    world.oldest[name, int(attempt)] = 0
    world.answer(("sample", name, attempt))
    assert isinstance(world.end, Fail)
    assert f"sample {name} came back with a token of version 0" in world.end.why


def test_an_answer_that_fits_in_no_microbatch_fails_like_any_other() -> None:
    world = World(make_rules(max_tokens_per_microbatch=4, retries=1)).start()
    end = world.run_out()
    assert isinstance(end, Fail)
    assert "train.max_tokens_per_microbatch is 4" in end.why


def test_stories_of_what_lives() -> None:
    world = World(make_rules()).start().settle(*EARLY, "read")
    assert "attempt 0 on server server0" in world.core.story("0.0")
    assert "position 0, floor 0, deadline 1" in world.core.story("0")
    assert "serving" in world.core.story("server0")
    assert "publishing" in world.core.story("trainer")
    assert "the log has what is over" in world.core.story("77")


def test_rules_that_no_run_could_follow() -> None:
    for changes, what in (
        ({"minibatches": 3}, "divide"),
        ({"group_size": 8, "max_concurrent": 7}, "room"),
        ({"min_group": 2}, "min_group"),
    ):
        with pytest.raises(ValueError, match=what):
            World(make_rules(**changes))


def test_updates_left_out_beyond_the_budget_end_the_run() -> None:
    world = World(make_rules(batch_groups=1, group_size=1, steps=10, nan_budget=1)).start()
    for step in range(2):
        world.settle("publish", "swap", "read", "sample", "score")
        (train,) = world.find("train")
        event = replace(world._event(world.pending.pop(train), None), skipped="the gradient is not finite")
        world._note(event)
        commands = world.send(event)
        assert any(isinstance(command, Fail) for command in commands) == (step == 1)
    (fail,) = commands
    assert isinstance(fail, Fail)
    assert "the updates of 2 steps were left out" in fail.why
    assert "step 1: the gradient is not finite" in fail.why
