"""Weighted sums of rewards: `0.9*math + 0.1*my_rewards:tidy`, its grammar, and what becomes of the parts' outcomes.

    sum     = [sign] term {sign term}
    term    = [weight "*"] name             the weight of a bare name is 1
    weight  = [sign] number                 finite
    name    = a built-in reward | module ":" function

What always holds: a name stands once; a sum of one term with weight 1 is that reward itself, with its verdict; any
other sum is a number (`given`), unless a part has none. `total` may be taken in steps: of some parts, then of that and
the others. Nothing but the standard library and `messages` is loaded, so that a configuration is checked with it.
"""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from areal_async.errors import RewardError
from areal_async.messages import RewardTable, Verdict
from areal_async.rewards.verdicts import Outcome, given, reward_of

LOCAL: Final = ("exact", "numeric", "regex", "choice", "math", "code", "reasoning_gym")
HTTP: Final = "http"
NAMES: Final = (*LOCAL, HTTP)
"""The built-in rewards: those that are checked in a killable child, and the one that is asked for."""

PART_CHARACTERS: Final = 1000  # of a part's `why`, whose end says most where it is a traceback

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\.?\d(?:[\w.]|(?<=[eE])[+-])*)|(?P<name>[^\W\d][\w.]*(?::[\w.]*)?)|(?P<sign>[+\-*])"
    r"|(?P<end>$)|(?P<other>\S))"
)
_FUNCTION: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

_WORST: Final[tuple[frozenset[Verdict], ...]] = (
    frozenset({"bad_data"}),  # before infrastructure: to check again doesn't mend the data
    frozenset({"infrastructure"}),
    frozenset({"timeout", "crash"}),
)


class Term(NamedTuple):
    """name: a built-in reward, or `module:function`."""

    weight: float
    name: str

    def __str__(self) -> str:
        return self.name if self.weight == 1 else f"{self.weight:g} × {self.name}"


def terms(function: str) -> tuple[Term, ...]:
    """The terms of `reward.function`. RewardError if it is no sum of rewards; `module:function` isn't looked up."""
    return _Parser(function).terms()


def alone(parts: Sequence[Term]) -> bool:
    """Whether this is one reward as it is, so that its own verdict is the check's."""
    return len(parts) == 1 and parts[0].weight == 1


def weighed(term: Term, outcome: Outcome, table: RewardTable) -> Outcome:
    """A part's outcome as a summand: `given` with the part's weighed reward, or the verdict that it fails with."""
    said = f"{outcome.verdict} {outcome.reward:g}" if outcome.reward is not None else outcome.verdict
    why = outcome.why
    if len(why) > PART_CHARACTERS:
        why = f"…{why[-PART_CHARACTERS:]}"
    why = f"{term}: {said}" + (f", {why}" if why else "")
    reward = reward_of(outcome, table)
    if _rank(outcome) < len(_WORST) or reward is None:
        return Outcome(outcome.verdict, why, outcome.extracted, settled=outcome.settled)
    # + 0.0: no -0.0 where a part is counted against
    return given(term.weight * reward + 0.0, why, outcome.extracted)


def total(summands: Sequence[Outcome]) -> Outcome:
    """The sum of summands; those that failed decide, the worst first, then the first."""
    why = "; ".join(summand.why for summand in summands if summand.why)
    extracted = next((summand.extracted for summand in summands if summand.extracted), "")
    worst = min(summands, key=_rank)
    if _rank(worst) < len(_WORST):
        return Outcome(worst.verdict, why, extracted, settled=any(summand.settled for summand in summands))
    return given(sum(summand.reward or 0.0 for summand in summands), why, extracted)


def _rank(outcome: Outcome) -> int:
    return next((rank for rank, verdicts in enumerate(_WORST) if outcome.verdict in verdicts), len(_WORST))


class _Token(msgspec.Struct, frozen=True):
    """kind: number, name, sign, end, other. at: index of its first character."""

    kind: str
    text: str
    at: int


class _Parser:
    def __init__(self, function: str) -> None:
        self._function = function
        self._next = 0
        self._token = self._read()

    def terms(self) -> tuple[Term, ...]:
        found: list[Term] = []
        places: dict[str, int] = {}
        while not found or self._token.kind != "end":
            if found and not self._at_sign():
                raise self._error(self._token.at, self._unjoined())
            weight = self._sign() * self._weight()
            name, at = self._name()
            if name in places:
                where = f"character {places[name] + 1}"
                raise self._error(at, f"{name} stands at {where} already; write it once, with one weight")
            places[name] = at
            found.append(Term(weight, name))
        return tuple(found)

    def _at_sign(self) -> bool:
        return self._token.text in ("+", "-")

    def _unjoined(self) -> str:
        if self._token.text == "*":
            return "a weight stands before the name: 0.5*math"
        return f"{self._shown(self._token)} after a term; join terms by + or -"

    def _sign(self) -> float:
        if not self._at_sign():
            return 1.0
        sign = self._token.text
        self._token = self._read()
        return -1.0 if sign == "-" else 1.0

    def _weight(self) -> float:
        signed = self._at_sign()  # a second sign is the number's own: math + -0.1*my_rewards:long
        factor = self._sign()
        weight = self._token
        if weight.kind != "number":
            if signed:
                raise self._error(weight.at, f"a weight must follow two signs, not {self._shown(weight)}")
            return factor
        number = self._number(weight)
        self._token = self._read()
        if self._token.text != "*":
            what = f"`*` and a name must follow the weight {weight.text}, not {self._shown(self._token)}"
            raise self._error(self._token.at, f"{what}; such as {weight.text}*math")
        self._token = self._read()
        return factor * number

    def _number(self, token: _Token) -> float:
        try:
            number = float(token.text)
        except ValueError:
            raise self._error(token.at, f"the weight {token.text!r} is no number; write it as in 0.5*math") from None
        if not math.isfinite(number):
            raise self._error(token.at, f"the weight {token.text} is not finite; write it as in 0.5*math")
        return number

    def _name(self) -> tuple[str, int]:
        token = self._token
        if token.kind != "name":
            raise self._error(token.at, f"a reward's name is missing: there is {self._shown(token)}")
        self._token = self._read()
        if token.text in NAMES or _FUNCTION.fullmatch(token.text):
            return token.text, token.at
        near = difflib.get_close_matches(token.text.partition(":")[0], NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(NAMES)
        raise self._error(
            token.at,
            f"{token.text!r} is no reward; write one of {known}, or `module:function`, one of your own{hint}",
        )

    def _read(self) -> _Token:
        match = _TOKEN.match(self._function, self._next)
        assert match  # `other` takes any sign, `end` the end
        assert match.lastgroup
        self._next = match.end()
        return _Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup))

    @staticmethod
    def _shown(token: _Token) -> str:
        return "nothing more" if token.kind == "end" else repr(token.text)

    def _error(self, at: int, what: str) -> RewardError:
        if what.startswith(repr(self._function)):  # the whole of it is named: no place to point to
            return RewardError(what)
        return RewardError(f"{self._function!r}, character {at + 1}: {what}")
