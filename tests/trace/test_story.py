"""Stories: of whatever happens to a group, a sample, a step, a server, a worker, the trainer."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from areal_async.messages import (
    AnyRecord,
    Cancel,
    Failed,
    Lost,
    Note,
    Rules,
    SampleDone,
    Scored,
    StepDone,
    WhenOlder,
)
from areal_async.trace.lives import Lives
from areal_async.trace.story import Line, _teller, shown
from areal_async.trace.things import Thing, thing

from ..audit_lies import change, place, records, true_log, with_more
from ..core.world import World, make_rules
from .written import turns_of


def told(log: Sequence[AnyRecord], text: str) -> list[str]:
    """The texts of a story, without its times."""
    rules = log[0]
    assert isinstance(rules, Rules)
    teller = _teller(thing(text), rules)
    return [words for turn in turns_of(log) for _, words in teller.take(turn)]


def test_a_sample_from_prompt_to_release() -> None:
    assert told(true_log(), "0.0") == [
        "asked for: position 0 of the data order",
        "its prompt is read after 2.00 s: row 0, 3 tokens",
        "floor: version 0; step 2 is the last that may train it in time",
        "starts on server server0, which holds version 0",
        "attempt 0 failed after 6.00 s: boom",
        "attempt 1 starts on server server0, which holds version 0",
        "answered 1 token of version 0 in 12.00 s, ended at the token limit",
        "checked in 12.00 s: right, reward 0",
        "ready: 2 rewards, mean 0.5",
        "handed to training: step 1, branch 0 after 7.00 s as ready",
        "in step 1 with advantage -0.7071, lag 1: minibatch 0, rank 0, micro-batch 0",
        "trained: step 1 is done after 1.00 s, version 2",
        "its arrays leave memory",
        "released: nobody can ask for it again, and its arrays may leave the disk",
    ]


def test_a_group_tells_what_is_the_same_of_its_members_once() -> None:
    story = told(true_log(), "1")
    assert story[3] == "1.0, 1.1: starts on server server1, which holds version 0"
    assert story[-2:] == [
        "filtered: all 2 rewards are equal",
        "1.0, 1.1: released: nobody can ask for it again, and its arrays may leave the disk",
    ]


def test_going_back() -> None:
    log = true_log()
    cancelled = log[place(list(log), Cancel)]
    assert isinstance(cancelled, Cancel)
    number = cancelled.sample.split(".")[0]
    story = told(log, number)
    back = "training goes back from version 3 to 2, branch 1 (the trainer was lost)"
    ended = story.index(f"cancelled: {back}: nothing of it had its outcome, and its prompt is asked again")
    assert story[ended + 1].endswith("attempt 0 is stopped")
    again = story[ended + 2].removeprefix("its prompt is asked for again, as group ")
    assert told(log, again)[0].endswith(f"of the data order, which group {number} had before")
    assert f"{back}: step 2 will be trained again" in told(log, "5")
    assert "trained again: step 2, branch 1" in told(log, "5")


def world(policy: WhenOlder = "wait", **changes: object) -> World:
    usual: dict[str, object] = {
        **{"batch_groups": 1, "group_size": 2, "steps": 4, "max_staleness": 1, "when_older": policy, "retries": 0},
        **{"checkpoint_steps": 1, "min_group": 2, "max_failures": 9, "max_trainer_restarts": 9},
    }
    rules = make_rules(**{**usual, **changes})
    return World(rules, servers=rules.servers).start().settle("publish", "swap", "read")


def test_what_was_held_starts_again() -> None:
    one = world()
    one.answer(("sample", "0.0", "0"))
    one.answer(("score", "0.0", "0"))
    one.roll_back(0)
    one.run_out()
    story = told(records(one), "0.1")
    assert "attempt 0 is stopped: training goes back to version 0" in story
    assert "held until a server has the group's floor again" in story
    assert "attempt 1 starts on server server0, which holds version 0" in story
    assert "trained: step 0 is done after 3.00 s, version 1" in story


def test_what_was_checked_when_the_controller_died_is_checked_again() -> None:
    one = world()
    one.answer(("sample", "0.0", "0"))
    one.answer(("sample", "0.1", "0"))
    one.answer(("score", "0.0", "0"))
    one.resume()
    one.run_out()
    story = told(records(one), "0.1")
    assert "its check ended with the controller, and is made again" in story
    assert "ready: 2 rewards, mean 1" in story
    assert any("(the run is resumed)" in text for text in story)
    assert "the run is resumed by a new controller: it is started anew" in told(records(one), "server server0")
    assert "goes back from version 0 to 0, branch 1 (the run is resumed)" in told(records(one), "trainer")


def test_a_late_group_is_stale() -> None:
    one = world("drop", steps=6)
    while one.trained < 3:
        key = next(key for key in one.pending if key[:2] != ("sample", "0.0"))
        one.answer(key)
    story = told(records(one), "0.0")
    assert story[-2:] == ["stale: step 2 comes, and its deadline was 1", "attempt 0 is stopped"]
    assert told(records(one), "0.1")[-1].startswith("released: ")


def test_a_group_fails_with_its_member() -> None:
    one = world()
    one.answer(("sample", "0.1", "0"), "failed")
    story = told(records(one), "0")
    why = "0.1 failed in each of its 1 attempts; 1 members are left, 2 are needed"
    assert story[-2:] == [f"failed: {why}", "0.0: attempt 0 is stopped"]


def test_a_prompt_that_cannot_be_used_and_data_that_end() -> None:
    one = World(make_rules(max_failures=1), servers=1, prompts=2).start().settle("publish", "swap")
    one.answer(("read", "0"), "refused")
    one.settle("read")
    assert told(records(one), "0")[-1].startswith("failed: its prompt can't be used: ")
    assert "cancelled: the data have no prompt at this position: they ended" in told(records(one), "3")


def test_notes_of_requests_are_told() -> None:
    log = list(true_log())
    data: dict[str, str | int | float | bool | tuple[int | str, ...] | None] = {
        **{"sample": "3.1", "attempt": 0, "turn": 0, "request": 1, "from": "server0", "to": "server1"},
        **{"tokens": 7, "inferred": 7, "why": "the stream broke\nmore"},
    }
    at = place(log, SampleDone, sample="3.1") - 1
    notes = [Note(at=20.0, what=what, data=data) for what in ("continued", "moved", "repeated", "completed")]
    log = with_more(log, at, *notes)
    story = told(log, "3.1")
    assert "goes on after 7 tokens, on server server1 instead of server0: the stream broke …" in story
    assert "is asked of server server1 instead of server0: the stream broke …" in story
    assert not any("goes on after" in text for text in told(log, "3.0"))
    assert any("3.1: goes on after 7 tokens" in text for text in told(log, "3"))
    assert any("moved to other servers" in text for text in told(log, "server server0"))


def test_a_step() -> None:
    story = told(true_log(), "step 2")
    assert story[0] == "formed on branch 0: 2 groups, 4 samples; lag mean 2.00, max 2"
    assert story[1] == "  the trainer didn't wait for it: its groups were ready"
    assert story[3].split() == ["5", "0", "2", "12.00", "s", "version", "0", "2", "0/-0.71", "1/+0.71"]
    assert story[5:8] == [
        "  minibatch 0: 4 samples, divided by 26",
        "    rank 0: 1 micro-batch of 38 tokens",
        "done after 3.00 s: version 3",
    ]
    assert story[8] == (
        "training goes back from version 3 to 2, branch 1 (the trainer was lost): it will be trained again, with the "
        "same groups"
    )
    assert story[9] == "trained again on branch 1: 2 groups, 4 samples; lag mean 2.00, max 2"
    assert story[-1] == "what it trained is released: training can't go back to it any more"
    first = told(true_log(), "step 0")
    assert first[1] == "  the trainer waited 28.00 s for it, in the end for sample 3.1"


def test_a_step_whose_update_is_left_out() -> None:
    log = list(true_log())
    log = change(log, place(log, StepDone, step=1), skipped="the loss is nan", metrics={"loss": 0.5, "grad_norm": 2.0})
    story = told(log, "step 1")
    assert "done after 1.00 s: version 2; the update was left out: the loss is nan" in story
    assert "  loss 0.5, grad_norm 2" in story
    assert any(text.endswith("version 2; the update was left out: the loss is nan") for text in told(log, "0"))


def test_a_server() -> None:
    story = told(true_log(), "server server0")
    assert story[:3] == [
        "joins; it holds no weights of the run yet",
        "is told to load version 0, branch 0",
        "answers with version 0, branch 0, 1.00 s after it was told to; pause 0 ms",
    ]
    assert "  in 41.00 s with version 0: 9 samples placed, 8 answers of 32 tokens, 1 failed" in story
    log = true_log()
    placed = [
        text for name in ("server0", "server1") for text in told(log, f"server {name}") if "samples placed" in text
    ]
    started = sum(type(record).__name__ == "StartSample" for record in log)
    answers = sum(isinstance(record, SampleDone) for record in log)
    assert sum(int(text.split(": ")[1].split()[0]) for text in placed) == started
    assert sum(int(text.split(", ")[1].split()[0]) for text in placed) == answers


def test_a_server_that_is_lost() -> None:
    one = world(servers=2, max_restarts=3)
    one.lose("server0", "first line\nmiddle\nlast words")
    one.wake()
    story = told(records(one), "server server0")
    lost = story.index("lost: first line …")
    assert story[lost + 1 : lost + 3] == ["    middle", "    last words"]
    assert story[lost + 3].endswith("samples that ran on it go on elsewhere, from the tokens that came")
    assert story[lost + 4] == "is started again"


def test_a_reward_worker_and_the_trainer() -> None:
    one = world()
    one.lose("rewards.0", "killed")
    one.wake()
    assert told(records(one), "rewards.0")[:3] == [
        "joins: checks are given to it",
        "lost: killed",
        "  the checks that it had are made by others, or wait",
    ]
    story = told(true_log(), "trainer")
    assert "trains step 0, branch 0: 2 groups, 4 samples, after 28.00 s without work" in story
    assert "goes back from version 3 to 2, branch 1 (after its loss)" in story
    assert story[-1] == "the run ends (steps_done)"


def test_times_and_gaps_are_shown() -> None:
    lines = [Line(0, 1.0, "a"), Line(1, 1.25, "b"), Line(1, 1.25, "c")]
    assert list(shown(Thing("sample", "3.0"), iter(lines))) == [
        "sample 3.0",
        "      1.000 s               a",
        "      1.250 s      +250 ms  b",
        "      1.250 s               c",
    ]


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        *(("12", "group", "12"), ("group 12", "group", "12"), ("012", "group", "12"), ("group-12", "group", "12")),
        *(("12.3", "sample", "12.3"), ("sample 12.3", "sample", "12.3"), ("012.03", "sample", "12.3")),
        *(("step 6", "step", "6"), ("step-6", "step", "6"), ("server 0", "server", "0"), ("server-0", "server", "0")),
        *(("server0", "server", "server0"), ("gpu7:8000", "server", "gpu7:8000"), ("trainer", "trainer", "trainer")),
        *(("rewards.0", "worker", "rewards.0"), ("reward worker rewards.0", "worker", "rewards.0")),
    ],
)
def test_ids(text: str, kind: str, name: str) -> None:
    assert (thing(text).kind, thing(text).name) == (kind, name)


def test_what_is_told_twice_or_too_late_changes_nothing() -> None:
    log = list(true_log())
    lives_before = Lives(log[0])  # type: ignore[arg-type]
    again = [record for record in log if isinstance(record, SampleDone | Scored | StepDone)]
    lives = Lives(log[0])  # type: ignore[arg-type]
    for turn in turns_of(log):
        lives_before.take(turn)
    for turn in turns_of([*log[1:-1], *(replace(record, at=200.0) for record in again)]):
        lives.take(turn)
    assert lives.groups.keys() == lives_before.groups.keys()
    assert (lives.version, lives.step) == (lives_before.version, lives_before.step)


def test_a_loss_and_a_failure_of_a_step() -> None:
    one = world()
    one.settle("sample", "score")
    assert one.find("train")
    event = Failed(at=one.tick(), of="train", id="0", why="CUDA out of memory\nlong")
    lost = Lost(at=one.tick(), peer="trainer", id="trainer", why="gone")
    log = [*records(one), event, lost]
    assert told(log, "step 0")[-2:] == [
        "it failed: CUDA out of memory …",
        "the trainer is lost while it trains it: gone",
    ]
    assert "train 0 failed: CUDA out of memory …" in told(log, "trainer")
