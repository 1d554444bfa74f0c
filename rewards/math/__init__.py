r"""`math`: a mathematical answer against the data row's, by text first, then by value, symbolically last.

`answers` finds the answer, `text` cleans it, `parse` reads it, `compare` says whether two values are equal. How, and
what is decided where mathematics leaves it open: docs/rewards.md.

What always holds: a gold that says nothing gives no reward at all (`bad_data`), except to an answer that is the same
sign for sign; what is raised here is a `crash`, never `wrong`; nothing here depends on threads or signals.
"""

import re
from typing import Final

from areal_async.messages import MathOptions, RewardSpec
from areal_async.rewards.math.answers import Found, find, find_in_gold, spoken
from areal_async.rewards.math.compare import Policy, equal
from areal_async.rewards.math.parse import parse
from areal_async.rewards.math.text import Cleaned, read, words_of
from areal_async.rewards.math.values import Value
from areal_async.rewards.verdicts import Check, Grader, Outcome

WARM_UP: Final = (("(x-1)(x+2)", r"\boxed{x^2+x-2}"), (r"\frac{\sqrt{3}}{2}", r"\boxed{\sin 60^\circ}"))
SHOWN: Final = 200  # characters of an answer in a reason


def grader(spec: RewardSpec) -> Grader:
    """The grader of `spec.math`. Loads what grading needs, so that a check that is forked from here finds it loaded."""
    graded = _MathGrader(spec.math)
    for answer, response in WARM_UP:
        graded(Check(prompt="", response=response, answer=answer, finish="stop", columns={}))
    return graded


class _MathGrader:
    def __init__(self, options: MathOptions) -> None:
        self._options = options
        self._policy = Policy(bare_percent=options.bare_percent, rounding_digits=options.rounding_digits)

    def __call__(self, check: Check) -> Outcome:
        gold = find_in_gold(check.answer or "")
        if not gold:
            return Outcome("bad_data", "the data row has no answer")
        found = self._find(check, gold)
        if found is not None and found.text.strip() == gold:
            return Outcome("right", f"the same text ({found.place})", found.text)
        cleaned = read(gold)
        value = parse(gold)
        if not _says_something(gold, cleaned, value):
            return Outcome("bad_data", f"the data row's answer can't be read as mathematics: {_shown(gold)}")
        if found is None:
            return Outcome("no_answer", self._missing(check))
        outcome = self._compared(cleaned, value, found.text)
        if outcome.verdict == "wrong" and len(found.boxes) > 1:
            together = self._compared(cleaned, value, ", ".join(found.boxes))
            return together if together.verdict == "right" else outcome
        return outcome

    def _find(self, check: Check, gold: str) -> Found | None:
        cut = check.finish == "length"
        found = find(check.response, check.prompt, self._options, cut=cut)
        if found is None and not cut:
            said = spoken(check.response, check.prompt, self._options)
            if said is not None and said.strip() == gold:
                return Found(gold, "whole")
        return found

    def _missing(self, check: Check) -> str:
        """Why there is no answer."""
        if spoken(check.response, check.prompt, self._options) is None:
            return "only thought: there is no `</think>`, or another `<think>` after it"
        number = ", and no number" if self._options.last_number else ""
        cut = "; the response was cut" if check.finish == "length" else ""
        return f"there is no box and no `####`{number}{cut}"

    def _compared(self, gold: Cleaned, value: Value | None, answer: str) -> Outcome:
        given = read(answer)
        if (gold.unit == given.unit or None in (gold.unit, given.unit)) and _one_spelling(given.text) == _one_spelling(
            gold.text
        ):
            return Outcome("right", "the same after cleaning", answer)
        if (letter := _letter(gold.text, alone=True)) and (chosen := _letter(given.text, alone=False)):
            return Outcome("right" if chosen == letter else "wrong", f"the choice {chosen}", answer)
        if gold.words and given.words and _plain_words(gold.text) == _plain_words(given.text):
            return Outcome("right", "the same words", answer)
        if value is None:
            return Outcome("wrong", f"other words than {_shown(gold.text)}", answer)
        other = parse(answer)
        if other is None:
            return Outcome("wrong", f"can't be read as mathematics: {_shown(answer)}", answer)
        if equal(value, other, self._policy):
            return Outcome("right", "equal in value", answer)
        return Outcome("wrong", f"not equal to {_shown(gold.text)}", answer)


# --------------------------------------------------------------------------------------------------------- the gold

_DECLARED = re.compile(r"\\(?:text|mathrm|textbf|textit|textrm|mbox|operatorname|emph)\s*\{")
_ONE_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*\Z")
_NAME = re.compile(r"(?:[A-Z][a-z]+|\d+)(?:[ ,]+(?:[A-Z][a-z]+|\d+))*\Z")
_NUMBER_WORDS: Final = words_of(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million half third "
    "quarter"
)


def _says_something(gold: str, cleaned: Cleaned, value: Value | None) -> bool:
    r"""The gold can tell a wrong answer from a right one: it is mathematics, a choice, one word, a name, or declared
    text (`\text{…}`).

    Several plain words in small letters can't: a remark, a number in words, an explanation has many right forms.
    """
    if _letter(cleaned.text, alone=True):
        return True
    if not cleaned.words:
        return value is not None
    if not _NUMBER_WORDS.isdisjoint(re.split(r"[\s-]+", cleaned.text.lower())):
        return False
    return bool(_DECLARED.search(gold) or _ONE_WORD.match(cleaned.text) or _NAME.match(cleaned.text))


# ---------------------------------------------------------------------------------------------------------- by text

_LETTER = re.compile(r"(?:\(([A-J])\)|([A-J])(?:\s*[.:)]|\Z))\s*(.*)\Z", re.DOTALL)
_SPACE_BETWEEN = re.compile(r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9])|(?<=[0-9]) (?=[A-Za-z])")


def _letter(text: str, *, alone: bool) -> str | None:
    """The choice A to J that the text is (alone), or that it begins with: `E`, `(E)`, `E.`, `E: some text`."""
    match = _LETTER.match(text)
    if match is None or (alone and match[3]):
        return None
    return str(match[1] or match[2])


def _one_spelling(text: str) -> str:
    """Without spaces that separate nothing."""
    return _SPACE_BETWEEN.sub("", text)


def _plain_words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
