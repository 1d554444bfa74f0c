"""The reward `reasoning_gym`: the task's own grader judges what was taken as the answer, from 0 to 1.

A data row holds the entry that reasoning-gym made: the answer, and a column `metadata`, as an object or as JSON text,
which names the task (`source_dataset`). A column `task_options` has the options of the task that weren't left to their
defaults, since some graders look at them. Rows of a data source `reasoning_gym:TASK?…` are made so (docs/data.md).

The answer is what follows the last `exact_after` where that is set, else what stands in the last `<answer>…</answer>`,
else the whole response; white space around it is left away.

What always holds: the number is the grader's own (verdict `given`); what it raises is a `crash`; a cut answer is never
given to it, since another `<answer>` may have followed.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

import msgspec

from areal_async.errors import RewardError
from areal_async.messages import RewardSpec
from areal_async.rewards.verdicts import Check, Grader, Outcome, given

INSTALL: Final = "pip install 'areal-async[reasoning]'"
_NOT_BY_ITSELF: Final = "composite"  # a mixture; its entries name the task that made them
_TUPLES: Final = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}
"""Fields of tasks whose graders compare tuples; in data there are only lists."""

Score: TypeAlias = Callable[[str, Mapping[str, object]], float]


def grader(spec: RewardSpec) -> Grader:
    """RewardError if the package isn't there. Loads the graders of all tasks: a second, here and not in each check."""
    scorers = _all_scorers()
    after = spec.exact_after

    def grade(check: Check) -> Outcome:
        try:
            score, entry = _entry(check, scorers)
        except _NoEntryError as error:
            return Outcome("bad_data", str(error))
        if check.finish == "length":
            return Outcome("no_answer", "cut at the token limit")
        if after and after not in check.response:
            return Outcome("no_answer", f"no {after!r} in the response")
        answer = _answer(check.response, after)
        if not answer:
            return Outcome("no_answer", "an empty answer")
        return given(float(score(answer, entry)), f"expected {check.answer!r:.200}", answer)

    return grade


class _NoEntryError(Exception):
    """The data row is no entry of reasoning-gym."""


def _all_scorers() -> dict[str, Score]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise RewardError(f"the reward reasoning_gym needs the package reasoning-gym ({error}): {INSTALL}") from None
    return {name: cast("Score", reasoning_gym.get_score_answer_fn(name)) for name in DATASETS if name != _NOT_BY_ITSELF}


def _entry(check: Check, scorers: Mapping[str, Score]) -> tuple[Score, dict[str, object]]:
    """The grader and what it compares with."""
    columns = check.columns
    if "metadata" not in columns:
        there = ", ".join(columns) or "nothing"
        raise _NoEntryError(f"the data row has no column metadata, which names the task; it has: {there}")
    metadata = columns["metadata"]
    if isinstance(metadata, str):
        try:
            metadata = msgspec.json.decode(metadata)
        except msgspec.DecodeError as error:
            raise _NoEntryError(f"the column metadata is not JSON: {error}") from None
    task = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(task, str):
        raise _NoEntryError("the column metadata has no source_dataset, the name of a task")
    if task not in scorers:
        near = difflib.get_close_matches(task, scorers, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise _NoEntryError(f"reasoning-gym has no task {task!r}{hint}")
    for name in _TUPLES.get(task, ()):
        metadata = {**metadata, name: tuple(tuple(line) for line in metadata.get(name, ()))}
    options = columns.get("task_options")
    score = _with_options(task, options) if isinstance(options, dict) and options else scorers[task]
    question = columns.get("question", check.prompt)
    return score, {"question": question, "answer": check.answer, "metadata": metadata}


def _with_options(task: str, options: Mapping[str, object]) -> Score:
    import reasoning_gym

    return cast("Score", reasoning_gym.create_dataset(task, **options).score_answer)


def _answer(response: str, after: str | None) -> str:
    from reasoning_gym.utils import extract_answer

    if after:
        return response.rpartition(after)[2].strip()
    tagged = cast("str | None", extract_answer(response))
    return response.strip() if tagged is None else tagged
