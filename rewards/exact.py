"""The reward `exact`: the answer, or what follows a marker in it, is the data row's answer, sign for sign.

What always holds: surrounding white space doesn't count, everything else does; a cut answer is never right.
"""

from areal_async.rewards.verdicts import Check, Grader, Outcome, outcome


def exact(after: str | None) -> Grader:
    """A grader; after: compare what follows the last occurrence of this text. None: compare the whole response."""

    def grade(check: Check) -> Outcome:
        expected = (check.answer or "").strip()
        if not expected:
            return outcome("bad_data", "the data row has no answer")
        if check.finish == "length":
            return outcome("no_answer", "cut at the token limit")
        _, found, rest = check.response.rpartition(after) if after else ("", "", check.response)
        if after and not found:
            return outcome("no_answer", f"no {after!r} in the response")
        given = rest.strip()
        if not given:
            return outcome("no_answer", f"nothing after {after!r}" if after else "an empty response")
        return outcome("right" if given == expected else "wrong", f"{given[:200]!r}, expected {expected[:200]!r}")

    return grade
