r"""The signs of a cleaned answer: numbers, names, operators.

What always holds: each sign is one of the kinds below, or the text is Unreadable; every name that means something
(functions, constants, Greek letters, operators) stands here and nowhere else.
"""

import re
from typing import Final, NamedTuple

from areal_async.rewards.math.values import Unreadable

MAX_TOKENS: Final = 1_500
STEPS: Final = 20  # readings of a sign, on average: more is no answer
MAX_DIGITS: Final = 4_000  # of one number; Python itself refuses to read 4,301


class Token(NamedTuple):
    """kind: number, based, function, name, constant, command, sign, end. spaced: white space stands before it."""

    kind: str
    text: str
    spaced: bool


END: Final = Token("end", "", False)


def words(text: str) -> list[str]:
    """Its words, where they are many."""
    return text.split()


FUNCTIONS: Final = {
    **{name: name for name in words("sin cos tan cot sec csc sinh cosh tanh coth sech csch")},
    **{name: name for name in words("arcsin arccos arctan arccot arcsec arccsc arsinh arcosh artanh")},
    **{"a" + name: "arc" + name for name in words("sin cos tan")},
    **{name: name for name in words("ln log lg exp sgn max min gcd lcm abs floor ceil Re Im")},
    "arcsinh": "arsinh", "arccosh": "arcosh", "arctanh": "artanh", "asinh": "arsinh", "acosh": "arcosh",
    "atanh": "artanh", "sign": "sgn", "tg": "tan", "ctg": "cot", "arctg": "arctan",
}  # fmt: skip
"""As they are written, and their one name."""

GREEK: Final = frozenset(
    words(
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi omicron rho "
        "varrho sigma varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi "
        "Psi Omega ell hbar"
    )
)
RELATIONS: Final = {
    "=": "=", "<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\leq": "<=", "\\geq": ">=",
    "\\neq": "!=", "<=": "<=", ">=": ">=", "!=": "!=", "==": "=", "\\approx": "~", "\\in": "in", "\\equiv": "equiv",
    "\\to": "to", "\\notin": "notin", "\\sim": "sim", "\\subset": "subset", "\\subseteq": "subseteq",
}  # fmt: skip
SET_OPERATORS: Final = {"\\cup": "cup", "\\cap": "cap", "\\setminus": "setminus"}
_SAME: Final = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "ast": "times",
    "bullet": "cdot", "lbrack": "[", "rbrack": "]", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|",
    "varnothing": "emptyset",
}  # fmt: skip
_COMMANDS: Final = frozenset(
    words(
        "frac binom sqrt cdot times div pm mp circ infty emptyset lfloor rfloor lceil rceil langle rangle land lor "
        "begin end overline dot bar hat mathbb det tilde widehat overrightarrow"
    )
)
_DROPPED: Final = frozenset(words("left right displaystyle quad qquad limits big Big bigg Bigg vec angle triangle"))
_PLAIN_NAMES = sorted([*FUNCTIONS, "sqrt", "pi", "infty", "oo"], key=len, reverse=True)
_NAMES = re.compile("|".join(_PLAIN_NAMES))

_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<based>\d[0-9A-Z]*_(?:\{\d{1,2}\}|\d{1,2}(?!\d)))"
    r"|(?P<number>(?:\d+(?:\.(?:\d+|(?=\\overline|\\dot)))?|\.\d+)(?:[eE][-+]?\d{1,6}(?![\dA-Za-z.]))?)"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<escaped>\\[{}%|\\])"
    r"|(?P<sign><=|>=|!=|==|\*\*|[-+*/^_=<>!()\[\]{}|,;:'&])",
    re.ASCII,
)


def tokens(text: str) -> list[Token]:
    """The signs of a text, in order. Raises Unreadable."""
    found: list[Token] = []
    index, spaced = 0, False
    while index < len(text):
        match = _TOKEN.match(text, index)
        if match is None or len(found) > MAX_TOKENS:
            raise Unreadable("a sign that means nothing here, or too many of them")
        index = match.end()
        kind = str(match.lastgroup)
        if kind == "space":
            spaced = True
            continue
        _append(found, kind, match[kind], spaced)
        spaced = False
    return found


def is_named(run: str) -> bool:
    """A run of letters that has a function or a constant in it: `pi`, `sinx`."""
    return _NAMES.search(run) is not None


def _append(found: list[Token], kind: str, text: str, spaced: bool) -> None:
    if kind == "command":
        _command(found, _SAME.get(text, text), spaced)
    elif kind == "letters":
        _letters(found, text, spaced)
    elif kind == "escaped":
        found.append(Token("sign", "|" if text == "\\|" else text, spaced))
    elif kind == "sign":
        found.append(Token("sign", "^" if text == "**" else text, spaced))
    else:
        if len(text) > MAX_DIGITS:
            raise Unreadable("a number of too many digits")
        found.append(Token(kind, text, spaced))


def _command(found: list[Token], name: str, spaced: bool) -> None:
    if name in FUNCTIONS:
        found.append(Token("function", FUNCTIONS[name], spaced))
    elif name == "pi":
        found.append(Token("constant", "pi", spaced))
    elif name == "infty":
        found.append(Token("constant", "inf", spaced))
    elif name in GREEK:
        found.append(Token("name", name, spaced))
    elif name in _COMMANDS or f"\\{name}" in RELATIONS or f"\\{name}" in SET_OPERATORS:
        found.append(Token("command", f"\\{name}", spaced))
    elif name in ("[", "]", "|"):
        found.append(Token("sign", name, spaced))
    elif name not in _DROPPED:
        raise Unreadable(f"\\{name} means nothing here")


def _letters(found: list[Token], run: str, spaced: bool) -> None:
    """A run of letters: functions by their names, the rest letter by letter (`2xsinx`)."""
    index = 0
    while index < len(run):
        match = _NAMES.match(run, index)
        name = match[0] if match else run[index]
        index += len(name)
        if name in ("infty", "oo"):
            found.append(Token("constant", "inf", spaced))
        elif name == "sqrt":
            found.append(Token("command", "\\sqrt", spaced))
        elif name in ("pi", "e", "i"):
            found.append(Token("constant", name, spaced))
        elif name in FUNCTIONS:
            found.append(Token("function", FUNCTIONS[name], spaced))
        else:
            found.append(Token("name", name, spaced))
        spaced = False


class Reader:
    """A place in the signs of a text, which moves forward (and back, for another reading, STEPS times at most)."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._index = 0
        self._steps = STEPS * len(tokens) + 100

    @property
    def _next(self) -> Token:
        return self._tokens[self._index] if self._index < len(self._tokens) else END

    def _take(self) -> Token:
        token = self._next
        self._index += 1
        self._steps -= 1
        if self._steps < 0:
            raise Unreadable("too many readings")
        return token

    def _at(self, *texts: str) -> bool:
        token = self._next
        return token.text in texts and token.kind in ("sign", "command")

    def _accept(self, *texts: str) -> bool:
        if self._at(*texts):
            self._take()
            return True
        return False

    def _expect(self, *texts: str) -> Token:
        if not self._at(*texts):
            raise Unreadable(f"{texts[0]} is missing")
        return self._take()

    def _raw(self) -> str:
        """What stands up to the closing brace, as it is written."""
        texts = []
        while not self._accept("}"):
            if self._next.kind == "end":
                raise Unreadable("} is missing")
            texts.append(self._take().text)
        return "".join(texts)
