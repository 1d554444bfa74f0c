"""The reward `regex`: what a pattern finds in the response is the answer, or that it finds anything is enough.

A pattern with a group: of its last match the first group that took part is compared with the data row's answer, white
space around both left away. A pattern without: a response that it matches somewhere is right, and needs no answer in
the data row. Flags stand in the pattern: `(?s)`, `(?i)`, `(?m)`.

What always holds: a pattern that can't be used is a RewardError of `grader`, which says where it goes wrong; a cut
answer is never right, since what would have followed may be the last match. A pattern that doesn't come to an end is
stopped by the check's deadline: `timeout`.
"""

import re
from collections import deque

from areal_async.errors import RewardError
from areal_async.messages import RewardSpec
from areal_async.rewards.verdicts import Check, Grader, Outcome


def grader(spec: RewardSpec) -> Grader:
    """RewardError if there is no pattern, or it is none."""
    pattern = _compiled(spec.regex.pattern)
    return _comparing(pattern) if pattern.groups else _matching(pattern)


def _compiled(text: str | None) -> re.Pattern[str]:
    if text is None:
        raise RewardError(
            "reward.regex.pattern is not set; the reward regex needs one, such as '####\\s*(.+)' or '(?s)<b>.*</b>'"
        )
    try:
        return re.compile(text)
    except re.error as error:
        position = error.pos or 0
        raise RewardError(
            f"reward.regex.pattern: {error.msg} at position {position}: {text[:position]}⟶{text[position:]}"
        ) from None


def _comparing(pattern: re.Pattern[str]) -> Grader:
    def grade(check: Check) -> Outcome:
        expected = (check.answer or "").strip()
        if not expected:
            return Outcome("bad_data", "the data row has no answer")
        if check.finish == "length":
            return Outcome("no_answer", "cut at the token limit")
        last = deque(pattern.finditer(check.response), maxlen=1)
        if not last:
            return Outcome("no_answer", "the pattern matches nowhere")
        given = next((group for group in last[0].groups() if group is not None), "").strip()
        if not given:
            return Outcome("no_answer", "the group of the last match is empty")
        return Outcome("right" if given == expected else "wrong", f"expected {expected[:200]!r}", given)

    return grade


def _matching(pattern: re.Pattern[str]) -> Grader:
    def grade(check: Check) -> Outcome:
        if check.finish == "length":
            return Outcome("no_answer", "cut at the token limit")
        match = pattern.search(check.response)
        if match is None:
            return Outcome("wrong", "the pattern matches nowhere")
        return Outcome("right", "the pattern matches", match[0])

    return grade
