"""Weighted sums: what is written is what is read, and what becomes of the parts' outcomes."""

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.errors import RewardError
from areal_async.messages import RewardTable, Verdict
from areal_async.rewards.sums import NAMES, Term, alone, terms, total, weighed
from areal_async.rewards.verdicts import Outcome, reward_of

NO_REWARD = ("bad_data", "infrastructure")
FAILED = (*NO_REWARD, "timeout", "crash")
TABLE = RewardTable(right=2.0, wrong=-1.0, no_answer=-2.0, timeout=-3.0, crash=-4.0)

dotted = st.sampled_from(["a", "_b9", "ma", "e1", "my_rewards.tidy", "a.b.c", "math"])
names = st.sampled_from(NAMES) | st.builds("{}:{}".format, dotted, dotted)
weights = st.floats(allow_nan=False, allow_infinity=False)
sums = st.lists(st.builds(Term, weights, names), min_size=1, max_size=5, unique_by=lambda term: term.name)
spaces = st.sampled_from(["", " ", "  "])
numbers = st.floats(-100, 100)
outcomes = st.one_of(
    st.builds(Outcome, st.sampled_from([v for v in get_args(Verdict) if v != "given"]), st.text("ab", max_size=3)),
    st.builds(lambda reward: Outcome("given", "", "", reward), numbers),
)


def written(term: Term, sign: str, space: str) -> str:
    """With the weight's sign in front where there is none, or with the one that is there: a + -0.1*b."""
    if term.weight == 1 and sign != "-":
        return f"{sign}{space}{term.name}"
    weight = -term.weight if sign == "-" else term.weight
    return f"{sign}{space}{weight!r}{space}*{space}{term.name}"


@given(found=sums, data=st.data())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_what_is_written_is_read(found: list[Term], data: st.DataObject) -> None:
    text = ""
    for number, term in enumerate(found):
        sign = data.draw(st.sampled_from(["+", "-"] if number else ["", "+", "-"]))
        text += data.draw(spaces) + written(term, sign, data.draw(spaces))
    assert terms(text + data.draw(spaces)) == tuple(found)


@given(text=st.text("ab:.*+- 019e_mathexact", max_size=12))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_whatever_is_written_is_read_or_said_to_be_wrong(text: str) -> None:
    try:
        found = terms(text)
    except RewardError as error:
        said = str(error)
        found = ()
    else:
        said = repr(text)
        assert found
    assert repr(text) in said
    assert all(math.isfinite(term.weight) for term in found)
    assert len({term.name for term in found}) == len(found)


def test_the_usual_forms() -> None:
    assert terms("math") == (Term(1.0, "math"),)
    assert terms("0.9*math + 0.1*my_rewards:tidy") == (Term(0.9, "math"), Term(0.1, "my_rewards:tidy"))
    assert terms("code - 1e-3*a.b:C.long") == (Term(1.0, "code"), Term(-1e-3, "a.b:C.long"))
    assert [alone(terms(function)) for function in ("math", "1*math", "2*math", "math+code")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exakt", "'exakt' is no reward; write one of exact, .*, http, or `module:function`.*; did you mean 'exact'?"),
        ("0.9*mth + exact", r"'0.9\*mth \+ exact', character 5: 'mth' is no reward; .*did you mean 'math'"),
        ("my_rewards", "'my_rewards' is no reward; write one of exact, .*, or `module:function`"),
        ("my_rewards:", "'my_rewards:' is no reward"),
        ("a:b:c", "character 4: ':' after a term; join terms by"),
        ("my-rewards:f", "character 1: 'my' is no reward"),
        ("", "character 1: a reward's name is missing: there is nothing more"),
        ("math +", "character 7: a reward's name is missing"),
        ("math code", "character 6: 'code' after a term; join terms by"),
        ("math*0.5", r"character 5: a weight stands before the name: 0.5\*math"),
        ("0.5 math", r"character 5: `\*` and a name must follow the weight 0.5, not 'math'; such as 0.5\*math"),
        ("0.5", r"character 4: `\*` and a name must follow the weight 0.5, not nothing more"),
        ("1e999*math", "character 1: the weight 1e999 is not finite"),
        ("1.2.3*math", "character 1: the weight '1.2.3' is no number"),
        ("1/3*math", "character 2: .*, not '/'"),
        ("math + -code", "character 9: a weight must follow two signs, not 'code'"),
        ("math + 2*math", "character 10: math stands at character 1 already; write it once"),
        ("(math)", r"character 1: a reward's name is missing: there is '\('"),
    ],
)
def test_what_is_no_sum_is_said(function: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        terms(function)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(get_args(Verdict), repeat=2)))
def test_every_pair_of_verdicts(first: Verdict, second: Verdict) -> None:
    """No reward where a part has none; a part that broke decides; else the sum of what the table says."""
    parts = [Outcome(verdict, f"why {verdict}", "", 0.5 if verdict == "given" else None) for verdict in (first, second)]
    found = total([weighed(Term(0.5, "math"), parts[0], TABLE), weighed(Term(-2.0, "a:b"), parts[1], TABLE)])
    failed = sorted(
        (verdict for verdict in (first, second) if verdict in FAILED), key=lambda v: min(FAILED.index(v), 2)
    )
    if failed:
        assert (found.verdict, found.reward) == (failed[0], None)
        assert reward_of(found, TABLE) == {"timeout": -3.0, "crash": -4.0}.get(failed[0])
    else:
        rewards = {"right": 2.0, "wrong": -1.0, "no_answer": -2.0, "given": 0.5}
        assert (found.verdict, found.reward) == ("given", 0.5 * rewards[first] - 2.0 * rewards[second])
    assert f"0.5 × math: {first}" in found.why
    assert f"why {second}" in found.why


@given(parts=st.lists(st.tuples(numbers, outcomes), min_size=2, max_size=5), data=st.data())
@settings(derandomize=True, max_examples=100, deadline=None)
def test_a_sum_may_be_taken_in_steps(parts: list[tuple[float, Outcome]], data: st.DataObject) -> None:
    summands = [weighed(Term(weight, f"m:f{i}"), part, TABLE) for i, (weight, part) in enumerate(parts)]
    cut = data.draw(st.integers(1, len(parts) - 1))
    whole, stepwise = total(summands), total([total(summands[:cut]), total(summands[cut:])])
    assert (whole.verdict, whole.why, whole.extracted) == (stepwise.verdict, stepwise.why, stepwise.extracted)
    assert whole.reward == pytest.approx(stepwise.reward)
    assert whole.verdict in ("given", *FAILED)
    assert whole.reward is None or math.isfinite(whole.reward)


def test_a_sum_with_a_settled_part_is_settled() -> None:
    asked = weighed(Term(0.5, "http"), Outcome("infrastructure", settled=True), TABLE)
    assert total([Outcome("infrastructure"), asked]).settled
    assert not total([Outcome("infrastructure"), Outcome("given", reward=1.0)]).settled


def test_what_is_told_of_the_parts() -> None:
    found = total(
        [
            weighed(Term(0.9, "math"), Outcome("right", "4 is 4", "4"), RewardTable()),
            weighed(Term(1.0, "my:tidy"), Outcome("given", "", "other", 0.3), RewardTable()),
            weighed(Term(-1.0, "my:long"), Outcome("wrong", "x" * 5000), RewardTable()),
        ]
    )
    assert found.why.startswith("0.9 × math: right, 4 is 4; my:tidy: given 0.3; -1 × my:long: wrong, …xxx")
    assert len(found.why) < 1100
    assert (found.extracted, found.reward) == ("4", pytest.approx(1.2))


def test_a_sum_over_the_largest_number_is_no_reward() -> None:
    found = total([weighed(Term(1e308, name), Outcome("given", "", "", 1.7), RewardTable()) for name in ("a:a", "b:b")])
    assert (found.verdict, found.reward) == ("bad_data", None)


def test_nothing_taken_away_is_plain_nothing() -> None:
    assert str(weighed(Term(-1.0, "http"), Outcome("wrong"), RewardTable()).reward) == "0.0"
