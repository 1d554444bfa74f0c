"""The reward `choice`: the letter (or the number) of the option that the response states as its answer.

The data row's answer is a letter or a number of up to three digits; `B`, `b`, `(B)` and `B.` are the same. Only labels
of its kind are looked for, by these rules:

1. A statement: `\\boxed{B}`; `answer`, `choice` or `option` with `is` or `:` before the label (`The answer is (B)`,
   `**Answer:** B`, `the correct option is B`); `I choose B`; `B is correct`, `Option B is the best answer`; what
   follows `exact_after`, where that is set.
2. Only where there is none: a line that is nothing but the label (`B.`, `**(B)**`), a label that is bold, with its
   option's text or without (`**B**`, `**B. Paris**`), a response of one line that begins with it (`B) Paris`).

The last statement wins. Several labels in it (`A or B`) can't be right: `wrong`; nor can a box with something else in
it. Marks around a label (brackets, quotes, `**`, `$`, `\\text{}`) don't count. A label without marks must be followed
by the end of a line, a sentence or a clause, as a small letter by the end of its line: so a letter within prose is none
(`A dog`, `The answer is A dog`, `The answer is a matter of taste`).

What always holds: the verdict is that of the last statement, however often a label is named before; a cut answer is
never right, since another statement may have followed.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from areal_async.messages import RewardSpec, Verdict
from areal_async.rewards.verdicts import Check, Grader, Outcome

_OPEN: Final = r"(?:\*\*|__|[(\[{$\"'“‘`]|\\(?:text(?:bf)?|math(?:rm|bf))\s*\{|\\\()"
_MARKS: Final = 6  # around one label; a bound, or a line of stars would be gone through from each of them
_CLOSE: Final = r"(?:\*\*|__|[)\]}$\"'”’`]|\\\))"
_BEFORE: Final = re.compile(
    rf"\s*(?:the\s+)?(?:(?:option|choice|letter|number)\s+)?(?P<marks>(?:{_OPEN}\s*){{0,{_MARKS}}})", re.IGNORECASE
)
_LABEL: Final = {
    "letter": re.compile(r"[A-Za-z](?!\w|['’]\w)"),
    "number": re.compile(r"[0-9]{1,3}(?!\w|[.,][0-9]|\s?%)"),
}
_MARKED_END: Final = re.compile(rf"\s*(?:{_CLOSE}|[.,:;!?](?!\w)|$)")
_END: Final = re.compile(
    r"[ \t]*(?:\n|$)|[.,:;!?)](?!\w)|\s*\*\*|\s+[-–—]\s|\s*[/&]|\s+(?:because|since|as|and|or|but|which|with|for)\b"
)
_SMALL_END: Final = re.compile(r"\)|[.,:;!?]?[ \t]*(?:\n|$)|\*\*")
_CLOSING: Final = re.compile(rf"(?:[.:]?\s*{_CLOSE}){{0,{_MARKS}}}")
_ANOTHER: Final = re.compile(r"\s*(?:,\s*(?:and|or)\b|[,/&]|\b(?:and|or)\b)")

_STATES: Final = re.compile(
    r"\b(?:answer|choice|option)s?\b(?:\s+(?:to|for)\s[^.:\n]{1,100}?)?(?:\*\*|__)?\s*"
    r"(?:\b(?:is|are|would\s+be|should\s+be|must\s+be)\b|[:=])(?:\*\*|__|\s|:)*"
    r"|\bI(?:['’](?:ll|d)|\s+will|\s+would)?\s+(?:choose|pick|select|go\s+with)\b",
    re.IGNORECASE,
)
_IS_RIGHT: Final = re.compile(
    rf"(?<!\w)(?P<marks>{_OPEN}{{0,{_MARKS}}})(?P<label>[A-Za-z]|[0-9]{{1,3}}){_CLOSE}{{0,{_MARKS}}}\s+is\s+(?:the\s+)?"
    r"(?:(?:best|only|most\s+likely)\s+)*(?:correct|right|best|answer)\b"
)
_NO_STATEMENT: Final = re.compile(r"\b(?:and|or|nor|if|whether|neither|that|suppose|assume)\s+$", re.IGNORECASE)
_WORD_BEFORE: Final = 20  # characters that such a word before a label may take
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LINE: Final = re.compile(r"^[ \t]*(?:(?:[-*>]|#+)[ \t]+)?(?=\S)", re.MULTILINE)
_BOLD: Final = re.compile(r"(?:\*\*|__)(?=\S)")
_PROSE: Final = re.compile(r"\s*(?:is|are|was|were|has|have|can|and|or|but)\b|\s*,")
_ROW_ANSWER: Final = re.compile(rf"(?:{_OPEN}\s*)*(?P<label>[A-Za-z]|[0-9]{{1,3}})[.:]?(?:\s*{_CLOSE})*[.:]?")


class _Statement(NamedTuple):
    """at: where its label begins. labels: those it names; none if it states something else. end: behind them."""

    at: int
    labels: tuple[str, ...]
    end: int
    text: str


def grader(spec: RewardSpec) -> Grader:
    """With `exact_after`: only what follows its last occurrence is looked at."""
    after = spec.exact_after

    def grade(check: Check) -> Outcome:
        row = _ROW_ANSWER.fullmatch((check.answer or "").strip())
        if row is None:
            return Outcome("bad_data", f"the data row's answer {check.answer!r:.200} is no letter and no number")
        expected = _plain(row["label"])
        if check.finish == "length":
            return Outcome("no_answer", "cut at the token limit")
        _, found, rest = check.response.rpartition(after) if after else ("", "", check.response)
        if after and not found:
            return Outcome("no_answer", f"no {after!r} in the response")
        kind = "number" if expected.isdigit() else "letter"
        first = [stated] if after and (stated := _labels(rest, 0, kind)) else []
        stated = max([*first, *_statements(rest, kind)] or _weaker(rest, kind), key=_place, default=None)
        if stated is None:
            return Outcome("no_answer", "no option is stated as the answer")
        verdict: Verdict = "right" if set(stated.labels) == {expected} else "wrong"
        return Outcome(verdict, f"expected {expected!r}", ", ".join(stated.labels) or stated.text)

    return grade


def _plain(label: str) -> str:
    return str(int(label)) if label.isdigit() else label.upper()


def _place(stated: _Statement) -> int:
    return stated.at


def _statements(text: str, kind: str) -> Iterator[_Statement]:
    """Rule 1."""
    for lead in _STATES.finditer(text):
        if stated := _labels(text, lead.end(), kind):
            yield stated
    for found in _IS_RIGHT.finditer(text):
        label, marked = found["label"], bool(found["marks"])
        of_kind = label.isdigit() if kind == "number" else label.isupper() or (label.isalpha() and marked)
        if of_kind and not _NO_STATEMENT.search(text, max(0, found.start() - _WORD_BEFORE), found.start()):
            yield _Statement(found.start("label"), (_plain(label),), found.end("label"), found[0])
    closing = _closing_braces(text)
    for box in _BOX.finditer(text):
        if box.end() in closing:
            content = text[box.end() : closing[box.end()]]
            inner = _labels(content, 0, kind)
            yield _Statement(box.end(), inner.labels if inner else (), closing[box.end()], content.strip())


def _weaker(text: str, kind: str) -> Iterator[_Statement]:
    """Rule 2."""
    for line in _LINE.finditer(text):
        stated = _labels(text, line.end(), kind)
        if stated and not text[stated.end :].split("\n", 1)[0].strip(" \t.,:;!"):
            yield stated
    for bold in _BOLD.finditer(text):
        if stated := _labels(text, bold.start(), kind):
            yield stated
    alone = text.strip()
    if "\n" not in alone and (stated := _labels(alone, 0, kind)) and not _PROSE.match(alone, stated.end):
        yield stated


def _labels(text: str, at: int, kind: str) -> _Statement | None:
    """The label that begins here, and those that are joined to it; None if there is none."""
    found: list[re.Match[str]] = []
    end = place = at
    while True:
        before = _BEFORE.match(text, place)
        assert before is not None  # it matches nothing, too
        label = _LABEL[kind].match(text, before.end())
        if label is None or not _ends(text, label, marked=bool(before["marks"])):
            break
        found.append(label)
        closing = _CLOSING.match(text, label.end())
        assert closing is not None
        end = closing.end()
        joined = _ANOTHER.match(text, end)
        if joined is None:
            break
        place = joined.end()
    if not found:
        return None
    begin = found[0].start()
    return _Statement(begin, tuple(_plain(label[0]) for label in found), end, text[begin:end])


def _ends(text: str, label: re.Match[str], *, marked: bool) -> bool:
    """Whether what follows lets it be a label."""
    if marked:
        return _MARKED_END.match(text, label.end()) is not None
    return (_SMALL_END if label[0].islower() else _END).match(text, label.end()) is not None


def _closing_braces(text: str) -> dict[int, int]:
    """Where the inside of each pair of braces begins -> where it ends. In one pass: thousands may be left open."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing
