r"""Where in a response the answer stands.

In this order: a box (`\boxed{…}`, `\fbox{…}`, the last one counts); what follows `####`; a response that is nothing but
an answer; and only if it is allowed, what stands on the last line alone, or the last number.

What always holds: the time grows linearly with the response, whatever it is; a box's content is found by counting
braces and is as long as it is; what a model only thought (before `</think>`) is no answer.
"""

import re
from typing import Final, Literal, TypeAlias

import msgspec

from areal_async.messages import MathOptions
from areal_async.rewards.math.text import FUNCTIONS

Place: TypeAlias = Literal["box", "####", "whole", "last line", "last number"]

SHORT: Final = 200  # characters of a response or a line that can be nothing but an answer
GAP: Final = 60  # characters between boxes of one answer ("$x = \boxed{2}$ and $y = \boxed{3}$")
OPEN, CLOSED = "<think>", "</think>"


class Found(msgspec.Struct, frozen=True):
    """text: the answer. place: where it stood. boxes: all boxes of the same sentence, if it was a box."""

    text: str
    place: Place
    boxes: tuple[str, ...] = ()


def find(response: str, prompt: str, options: MathOptions, *, cut: bool) -> Found | None:
    """The answer of a response; None if it has none. cut: it ends where the token limit was."""
    said = spoken(response, prompt, options)
    if said is None:
        return None
    found = _boxed(said, cut=cut) or _marked(said, cut=cut)
    if found is not None or cut:  # without a mark, nothing tells an answer from half an answer
        return found
    if not options.last_number:
        return _whole(said)
    if _CALCULATION.fullmatch(said):
        return _last_number(said)
    return _whole(said) or _last_line(said) or _last_number(said)


def find_in_gold(text: str) -> str:
    """A gold answer may be a whole solution: what its box or its `####` says, else all of it."""
    found = _boxed(text, cut=False) or _marked(text, cut=False)
    if found is None:
        return text.strip()
    return ", ".join(found.boxes) if len(found.boxes) > 1 else found.text


def spoken(response: str, prompt: str, options: MathOptions) -> str | None:
    """What is said, not thought; None if the thought has no end."""
    if options.thinking == "off":
        return response
    begin = response.rfind(CLOSED)
    if begin < 0:
        thinks = OPEN in response or prompt.rstrip().endswith(OPEN)
        return None if thinks or options.thinking == "required" else response
    said = response[begin + len(CLOSED) :]
    return None if OPEN in said else said


# ----------------------------------------------------------------------------------------------------------- boxes

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_PIECE = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z])(?:\s*(\{)(?:[^\\{}]*(\}))?|[ \t]*([^\s${}\\]+|\\[^\s$]+))?"
    r"|(?:\\[{}])+|(?:\\\\(?!boxed|fbox))+|(?:\{[^\\{}]*\}[^\\{}]*)+|\{+|\}+"
)
"""A box's begin, or the whole of it where nothing is inside; and in one piece what belongs to no box: escaped braces,
`\\`, groups without groups inside; for speed only. The last group that took part says which it is:"""
_OPENED, _WHOLE, _UNBRACED = 1, 2, 3
_SENTENCE_END = re.compile(r"[.!?]\s|\n\s*\n|\\\]")


_Box: TypeAlias = tuple[int, int, int, int]
"""begin, where its content begins, where that ends, end."""


def _boxed(text: str, *, cut: bool) -> Found | None:
    first = _BOX.search(text)
    if first is None:
        return None
    boxes, half = _boxes(text, first.start())
    if (cut and half) or not boxes:
        return None  # the box in which the response was cut would have been its answer
    together = len(boxes) - 1  # this one and those after it
    while together:
        end, begin = boxes[together - 1][3], boxes[together][0]
        if begin - end > GAP or _SENTENCE_END.search(text, end, begin):
            break
        together -= 1
    contents = [text[inner:inner_end].strip() for _, inner, inner_end, _ in boxes[together:]]
    return Found(contents[-1], "box", tuple(contents))


def _boxes(text: str, begin: int) -> tuple[list[_Box], bool]:
    """The boxes that aren't inside another and aren't empty; and whether one is open at the end."""
    done: list[_Box] = []
    opened: list[tuple[int, int] | None] = []  # boxes by where they and their content begin; None: another brace
    for piece in _PIECE.finditer(text, begin):
        start, end = piece.span()
        kind = piece.lastindex
        if kind == _WHOLE:
            _add(done, (start, piece.end(_OPENED), end - 1, end), text)
        elif kind == _OPENED:
            opened.append((start, end))
        elif kind == _UNBRACED:
            _add(done, (start, piece.start(kind), start + len(text[start:end].rstrip(".,;:!?")), end), text)
        elif text[start] == "}":
            for place in range(start, min(end, start + len(opened))):
                box = opened.pop()
                if box is not None:
                    _add(done, (*box, place, place + 1), text)
        elif text[start] == text[end - 1] == "{":
            opened += [None] * (end - start)
    return done, any(box is not None for box in opened)


def _add(done: list[_Box], box: _Box, text: str) -> None:
    begin, inner, inner_end, _ = box
    while done and done[-1][0] > begin:
        done.pop()  # it is inside this one
    if text[inner : min(inner_end, inner + SHORT)].strip():
        done.append(box)


# ---------------------------------------------------------------------------------------------------- without a box

_AFTER_MARK = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = r"(?:(?<![\w)}])[-+−])?[$€£]?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\s?\\?%|\s?percent\b)?"
_LAST_NUMBER = re.compile(_NUMBER)
_ONLY_NUMBER = re.compile(rf"({_NUMBER})\s*[.!]?\s*\Z")
_LETTER_FIRST = re.compile(r"\(?([A-J])(?:\)|[.:])(?:\s|\Z)|([A-J])\Z")
_LONG_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
_NO_PROSE: Final = FUNCTIONS | {"percent", "and"}
_SHORT_PROSE = re.compile(
    r"(?<![A-Za-z\\])(?:is|it|so|we|to|of|in|at|by|on|my|an|as|be|no|if|he|do|us|go)(?![A-Za-z])", re.I
)
_DIGITS: Final = "0123456789"
_CALCULATION: Final = re.compile(r"[-+*/^,;:()\d\s.]*[=<>][-+*/^=<>,;:()\d\s.]*")
"""`6*7=42, 42+1=43`: with nothing unknown in it, it says a result rather than being one."""
_MATHEMATICS: Final = (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def _marked(text: str, *, cut: bool) -> Found | None:
    """`#### 72`. A heading of Markdown begins so, too: what follows must be a number, or the end of the response."""
    begin = text.rfind("####")
    if begin < 0:
        return None
    found = _AFTER_MARK.match(text, begin)
    if found is None or not found[1].strip():
        return None
    last = not text[found.end() :].strip()
    if (cut and found.end() == len(text)) or not (last or _ONLY_NUMBER.match(found[1])):
        return None
    return Found(found[1].strip(), "####")


def _whole(text: str) -> Found | None:
    """A response that is an answer and no prose, or begins with a letter of choice."""
    text = text.strip()
    if letter := _LETTER_FIRST.match(text):
        return Found(letter[1] or letter[2], "whole")
    return Found(text, "whole") if _is_bare(text) else None


def _last_line(text: str) -> Found | None:
    line = text.rstrip()[-SHORT:].rpartition("\n")[2].strip().strip("*`")
    return Found(line, "last line") if _is_bare(line) else None


def _last_number(text: str) -> Found | None:
    """The last number; if it stands in `$…$` that is an answer, all that stands there."""
    last = max(map(text.rfind, _DIGITS))
    if last < 0:
        return None
    for opening, closing in _MATHEMATICS:
        end = text.rfind(closing)
        while end > 0 and text[end - 1] == "$" == closing:
            end -= 1
        if end > last:
            begin = text.rfind(opening, 0, last)
            inside = text[begin + len(opening) : end].strip()
            if begin >= 0 and _is_bare(inside):
                return Found(inside, "last number")
    begin = last
    while begin and text[begin - 1] in "0123456789.,/":
        begin -= 1
    numbers = list(_LAST_NUMBER.finditer(text, max(0, begin - 2), last + 20))
    return Found(numbers[-1][0], "last number") if numbers else None


def _is_bare(text: str) -> bool:
    """Mathematics without a word of prose."""
    if not text or len(text) > SHORT or "\n" in text or _BOX.search(text) or _SHORT_PROSE.search(text):
        return False
    return all(word.lower() in _NO_PROSE for word in _LONG_WORD.findall(text))
