"""The reward `exact`: the answer, or what follows a marker in it, is the data row's answer, sign for sign.

What always holds: surrounding white space doesn't count, everything else does; a cut answer is never right.
"""

from areal_async.messages import RewardSpec
from areal_async.rewards.verdicts import Check, Grader, Outcome


def grader(spec: RewardSpec) -> Grader:
    """With `exact_after`: compare what follows its last occurrence. Without: the whole response."""
    after = spec.exact_after

    def grade(check: Check) -> Outcome:
        expected = (check.answer or "").strip()
        if not expected:
            return Outcome("bad_data", "the data row has no answer")
        if check.finish == "length":
            return Outcome("no_answer", "cut at the token limit")
        _, found, rest = check.response.rpartition(after) if after else ("", "", check.response)
        if after and not found:
            return Outcome("no_answer", f"no {after!r} in the response")
        given = rest.strip()
        if not given:
            return Outcome("no_answer", f"nothing after {after!r}" if after else "an empty response")
        return Outcome("right" if given == expected else "wrong", f"expected {expected[:200]!r}", given)

    return grade
