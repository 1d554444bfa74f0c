r"""From an answer as it was written to plain LaTeX that a parser can read. Nothing here knows what the text means.

`clean` leaves: one style of every sign (`\times`, `\pi`, `^{2}` for their Unicode forms), no spacing, no sizes
(`\left`), no wrappers (`\text{…}`, `$…$`), no unit, no thousands separators, `\%` for percent, `,` for "and" and "or"
(`\land` and `\lor` where there is an inequality), no full stop at the end.

What always holds: `clean(clean(x)) == clean(x)`; the time grows linearly with the text; nothing raises.
A comma is a thousands separator only between digits with exactly three digits after it, else it separates a list;
inside brackets it separates, unless what follows can't be a number of its own ((1,000) but the pair (1,234)).
"""

import re
from typing import Final

import msgspec

from areal_async.rewards.math.units import DEGREE, SIGNS, Unit, unit_of


def words_of(text: str) -> frozenset[str]:
    """A table of words."""
    return frozenset(text.split())


LONGEST: Final = 20_000  # characters; what is longer is no answer, and is left as it is
MANY_BRACES: Final = 3  # around all of an answer
WRAPPERS: Final = words_of(
    "text mathrm mbox hbox textrm textbf textit texttt textsf textnormal textup emph mathbf mathit mathsf mathtt "
    "mathnormal operatorname boldsymbol bm pmb bold underline boxed fbox rm mathop ensuremath"
)
IGNORED: Final = words_of(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm middle displaystyle textstyle "
    "scriptstyle limits nolimits bf it sf tt em normalsize large Large LARGE huge small footnotesize centering "
    "boldmath nonumber notag protect quad qquad enspace enskip thinspace thickspace medspace negthinspace hfill "
    "newline allowbreak strut smallskip medskip"
)
SPACES: Final = words_of("quad qquad enspace enskip thinspace thickspace medspace hfill newline")
DELIMITERS: Final = words_of("left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle")
WITH_ARGUMENT: Final = words_of("hspace vspace phantom hphantom vphantom label tag color textcolor kern mspace")
SYNONYMS: Final = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le",
    "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne", "varnothing": "emptyset", "lbrace": "{",
    "rbrace": "}", "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "colon": ":",
    "lparen": "(", "rparen": ")", "gt": ">", "lt": "<", "degree": "circ", "dollar": "$", "textdollar": "$",
    "textdegree": "circ", "degrees": "circ", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "exp": "exp",
    "wedge": "land", "vee": "lor", "textpi": "pi", "textbackslash": "setminus", "backslash": "setminus",
    "percent": "%", "iff": "Leftrightarrow", "rightarrow": "to", "textasciicircum": "^", "lcm": "lcm",
}  # fmt: skip
FUNCTIONS: Final = words_of(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp lim max min sup inf gcd lcm det "
    "mod arg deg dim ker arccot arcsec arccsc sgn sqrt floor ceil"
)
_TRIGONOMETRY = re.compile(r"sin|cos|tan|cot|sec|csc")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")

_GREEK_LETTERS: Final = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩϕϵ"
_GREEK_NAMES: Final = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon
phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega phi epsilon"""
_CHARACTERS: Final = str.maketrans(
    {
        **{chr(0xFF01 + index): chr(0x21 + index) for index in range(94)},  # full width
        **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u2061\u2062\u200e\u200f", ""),
        **dict.fromkeys("−‐‑‒–—﹣", "-"), **dict.fromkeys("⋅·∙•", r"\cdot "),
        "×": r"\times ", "÷": r"\div ", "∕": "/", "⁄": "/", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ",
        "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ", "∅": r"\emptyset ", "∖": r"\setminus ", "⊂": r"\subset ",
        "⊆": r"\subseteq ", "∧": r"\land ", "∨": r"\lor ", "¬": r"\lnot ", "→": r"\to ", "∑": r"\sum ",
        "∏": r"\prod ", "∫": r"\int ", "°": r"^\circ ", "º": r"^\circ ", "∘": r"\circ ", "′": "'", "’": "'",
        "‘": "'", "“": '"', "”": '"', "。": ".", "、": ",", "，": ",", "…": r"\ldots ", "∣": "|", "‖": r"\|",
        "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
        "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
        "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
        **{sign: f"\\{name} " for sign, name in zip(_GREEK_LETTERS, _GREEK_NAMES.split(), strict=True)},
    }
)  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")

START: Final = "\x02"  # around what was in a wrapper such as \text, while it matters
END: Final = "\x03"

_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?\Z")
_SIMPLE = re.compile(r"[-+*/=()\[\]a-z0-9. ^]*\Z")  # nothing to do but white space, commas and units
_TOKEN = re.compile(r"\\([A-Za-z]+)\*?[ \t\n]*|\\(.)|[{}]|[^\\{}]+|\\", re.DOTALL)
_BRACE = re.compile(r"\\.|[{}]")
_ROW_SPACE = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|cm|mm|in)\s*\]")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_LOOSE_COMMA = re.compile(r"\s?\{\s?,\s?\}\s?")
_SPACED_DIGITS = re.compile(
    r"(?<![\d.,^_{])\d{1,3}(?:(?:,?\\!\s*|,\\[,;: ]\s*|\\[,;: ]\s*|~|\s)\d{3})+(?!\d|\s*/|\s*\\d?frac)"
)
_SEPARATOR = re.compile(r"\D+")
_DIGIT_RUN = re.compile(r"\d+(?:,\d+)+")
_OPENING, _CLOSING = "([", ")]"


class Cleaned(msgspec.Struct, frozen=True):
    """text: what is left. unit: behind it or, of currency, before it. words: it is text, not mathematics."""

    text: str
    unit: Unit | None = None
    words: bool = False


def clean(text: str) -> str:
    """The text without all that says nothing of the answer's value."""
    return read(text).text


def read(text: str) -> Cleaned:
    """The cleaned text, its unit, and whether it is made of words."""
    text = text.strip()
    if _NUMBER.match(text) or len(text) > LONGEST:
        return Cleaned(text)
    if not text.isascii():
        text = _plain_characters(text)
    text, sign = _without_currency(text.replace(START, "").replace(END, ""))
    text = _joined_digits(text)
    if "\\" in text or "{" in text:
        text = _without_commands(_ROW_SPACE.sub(r"\\\\", text))
    text = " ".join(text.replace("~", " ").split())
    if sign is None and _NUMBER.match(text):
        return Cleaned(text)
    text = _named_signs(_without_outer_braces(text))
    if any(map(str.isalpha, text)):
        text = _separated(text)
    if "," in text:
        text = _without_thousands(text)
    found = [_without_unit(part) for part in split(text)]
    units = {unit for _, unit in found if unit is not None}
    text = ", ".join(part for part, _ in found)
    words = _is_words(text)
    text = _without_ends(_without_marks(text))
    return Cleaned(text, units.pop() if len(units) == 1 else sign if not units else None, words)


def split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket and no brace (also semicolons)."""
    if "," not in text and ";" not in text:
        return [text]
    parts, depth, start = [], 0, 0
    for index, sign in enumerate(text):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign in ",;" and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


# ------------------------------------------------------------------------------------------------------ characters


def _plain_characters(text: str) -> str:
    text = re.sub("√\\s*(\\d+|[A-Za-z])", r"\\sqrt{\1}", text)
    if "√" in text:
        text = _rooted(text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+", lambda found: "^{" + found[0].translate(_RAISED) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎]+", lambda found: "_{" + found[0].translate(_LOWERED) + "}", text)
    return text.translate(_CHARACTERS)


def _rooted(text: str) -> str:
    r"""√(…) as \sqrt{…}."""
    out: list[str] = []
    open_roots: list[bool] = []
    after_root = False
    for sign in text:
        if sign == "√":
            out.append(r"\sqrt ")
            after_root = True
        elif sign == "(":
            open_roots.append(after_root)
            out.append("{" if after_root else "(")
            after_root = False
        elif sign == ")" and open_roots:
            out.append("}" if open_roots.pop() else ")")
        else:
            out.append(sign)
            after_root = after_root and sign.isspace()
    return "".join(out)


def _without_currency(text: str) -> tuple[str, Unit | None]:
    """Without dollar signs, of mathematics or of money, and other currency; with the currency."""
    sign = None
    for name, unit in SIGNS.items():
        if name in text:
            if name != "$" or r"\$" in text or text.count("$") % 2:
                sign = unit
            text = text.replace("\\" + name, " ").replace(name, " ")
    return text.strip(), sign


# -------------------------------------------------------------------------------------------------------- commands


def _without_commands(text: str) -> str:
    """Without wrappers (marked by START and END), sizes and spacing; with one name for each command."""
    out: list[str] = []
    closing: list[str] = []  # what a closing brace becomes
    skipped = 0  # groups that are left out
    pending = ""
    after_command = False  # a letter that follows needs a space
    for token in _TOKEN.finditer(text):
        name, sign = token[1], token[2]
        piece = token[0]
        if piece == "{":
            closing.append("skip" if pending == "skip" or skipped else END if pending == "wrap" else "}")
            skipped += closing[-1] == "skip"
            piece = "" if skipped else START if pending == "wrap" else "{"
            pending = ""
        elif piece == "}":
            closes = closing.pop() if closing else "}"
            piece = "" if closes == "skip" else closes
            skipped -= closes == "skip"
        elif name:
            piece, pending = _command(name, piece)
        elif sign:
            piece = _escaped(sign)
        elif pending and piece.strip():
            if pending == "delimiter":
                piece = piece.lstrip().removeprefix(".")
            pending = ""
        if skipped or not piece:
            continue
        if after_command and piece[0].isalpha():
            piece = " " + piece
        after_command = piece[-1].isalpha() and (piece[0] == "\\" or (after_command and piece == START))
        out.append(piece)
        if piece == START and len(out) > 1 and out[-2][0] == "\\" and out[-2][-1].isalpha():
            out[-1] = " " + START
    return "".join(out)


def _command(name: str, written: str) -> tuple[str, str]:
    """What a command becomes, and what its argument is to become."""
    if name in WRAPPERS:
        return "", "wrap"
    if name in WITH_ARGUMENT:
        return "", "skip"
    if name in IGNORED:
        return " " if name in SPACES else "", "delimiter" if name in DELIMITERS else ""
    new = SYNONYMS.get(name, name)
    space = " " if written[-1].isspace() else ""
    if new.isalpha():
        return f"\\{new}{space}", ""
    return (f"\\{new}" if new in "{}%" else new), ""


def _escaped(sign: str) -> str:
    if sign in "!()[]/":
        return ""
    if sign in ",;:> \n\t":
        return " "
    return sign if sign in "_#&^'\"" else "\\" + sign


def _without_outer_braces(text: str) -> str:
    """{5} and {1,2}, which show as 5 and 1,2."""
    for _ in range(MANY_BRACES):
        if not text.startswith("{") or not text.endswith("}") or text.endswith("\\}"):
            return text
        depth = 0
        for brace in _BRACE.finditer(text, 0, len(text) - 1):
            depth += 1 if brace[0] == "{" else -1 if brace[0] == "}" else 0
            if depth == 0:
                return text
        text = text[1:-1].strip()
    return text


# ---------------------------------------------------------------------------------------------------------- digits


def _joined_digits(text: str) -> str:
    r"""`9{,}500` and `11,\! 111` and `1\,000\,000` as one number; `3{,}14` is a decimal comma."""
    if "{" in text and "," in text:
        text = _LOOSE_COMMA.sub("{,}", text)
    if "{,}" in text:
        text = re.sub(r"(?<![\d}])[1-9]\d{0,2}(?:\{,\}\d{3})+(?!\d|\{,\})", lambda f: f[0].replace("{,}", ""), text)
        text = _BRACED_COMMA.sub(".", text).replace("{,}", ",")
    if " " in text or "\\" in text or "~" in text:
        text = _SPACED_DIGITS.sub(_joined, text)
    return text


def _joined(found: re.Match[str]) -> str:
    return found[0] if found[0][0] == "0" else _SEPARATOR.sub("", found[0])


def _without_thousands(text: str) -> str:
    """Without the commas that separate thousands."""
    if not _DIGIT_RUN.search(text):
        return text
    out, end, depth = [], 0, 0
    for found in _DIGIT_RUN.finditer(text):
        between = text[end : found.start()]
        depth += sum(between.count(sign) for sign in _OPENING) - sum(between.count(sign) for sign in _CLOSING)
        depth += between.count(r"\{") - between.count(r"\}")
        out += [between, _one_number(found[0], text[found.start() - 1 : found.start()], depth > 0)]
        end = found.end()
    return "".join([*out, text[end:]])


def _one_number(run: str, before: str, bracketed: bool) -> str:
    first, *groups = run.split(",")
    thousands = before != "." and len(first) <= 3 and first[0] != "0" and all(len(group) == 3 for group in groups)
    if bracketed:
        thousands = thousands and all(group[0] == "0" for group in groups)
    return "".join([first, *groups]) if thousands else run


# ----------------------------------------------------------------------------------------------------------- words

_PERCENT = re.compile(r"(?<!\\)%")
_PERCENT_WORDS = re.compile(
    rf"\s*{START}?\s*(?<![A-Za-z])(?:percent(?:age)?|pct|per cent|percentage points?)(?![A-Za-z])\s*{END}?"
)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAGNITUDE = re.compile(rf"(?<=[\d}}])(\s*{START}?\s*)(hundred|thousand|million|billion|trillion)s?(?![A-Za-z])")
_SEPARATED = re.compile(
    rf"(?:, ?)?(?: ?{START} ?,? ?(and|or) ?{END} ?|(?<![\w{START}]) (and|or) (?![\w]* ?{END})|(?<=[\d)}}$]) (and|or) )"
)
_FUNCTION = re.compile(rf"{START} ?({'|'.join(sorted(FUNCTIONS, key=len, reverse=True))}) ?{END}")
_ORDINAL = re.compile(rf"(?<=\d)(?:\^ ?\{{? ?)?{START}? ?(?:st|nd|rd|th) ?{END}?\}}?\Z")
_CLOCK = re.compile(rf"(?<![\w.:)}}])(\d{{1,2}})(:\d\d)?(?:\s?{START}\s?|\s|(?=[AP]M))([aApP])\.? ?[mM]\.? ?{END}?\Z")
_TO = re.compile(rf"(?<=\d) ?(?:{START} ?to ?{END}|(?<= )to) ?(?=\d)")
_ALL_REALS = re.compile(r"(?:the )?(?:set of )?all real(?: number)?s\Z", re.I)
_CIRCLE = re.compile(r"\^ ?(?:\\circ(?![A-Za-z])|\{ ?\\circ ?\}) ?")
_MARKS = re.compile(f"[{START}{END}]")


def _named_signs(text: str) -> str:
    r"""Percent as `\%`, "5 million" as a power of ten, degrees as `^\circ`, functions as commands."""
    if "%" in text:
        text = _PERCENT.sub(r"\\%", text)
        text = re.sub(r"\s+\\%", r"\\%", text)
    if START in text:
        text = _FUNCTION.sub(r"\\\1 ", text)
    if "per" in text or "pct" in text:
        text = _PERCENT_WORDS.sub(r"\\%", text)
    if "illion" in text or "thousand" in text or "hundred" in text:
        text = _MAGNITUDE.sub(lambda found: rf"\times 10^{{{_POWERS[found[2]]}}}{found[1].strip()}", text)
    if text[-1:] in "htdmM.})" or END in text[-2:]:
        text = _ORDINAL.sub("", text)
        text = _CLOCK.sub(lambda found: f"{found[1]}{found[2] or ':00'} {found[3].lower()}m", text)
    if "to" in text:
        text = _TO.sub(":", text)
    if "real" in text and _ALL_REALS.match(_MARKS.sub("", text).strip()):
        return r"\mathbb{R}"
    if r"\circ" in text:
        text = _CIRCLE.sub(lambda _: r"^\circ ", text).rstrip()
    return text


def _separated(text: str) -> str:
    """With a comma for "and" and "or" between answers; signs of logic where there is an inequality."""
    if "and" not in text and "or" not in text:
        return text
    logic = _RELATION.search(text) is not None

    def sign(found: re.Match[str]) -> str:
        word = found[1] or found[2] or found[3]
        return {"and": r" \land ", "or": r" \lor "}[word] if logic else ", "

    return _SEPARATED.sub(sign, text)


_NO_UNIT = words_of(
    "if for where when base mod is are was and or to the of not no on than else otherwise with such that as by from "
    "times plus minus over dozen am pm"
)
_WORD = re.compile(r"[A-Za-z]+")
_LABEL = re.compile(r"[A-Za-z ,.'()-]*(?:\^\{?\d\}?)?\Z")
_LONG_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{4,}")
_PARTS = re.compile(rf"{START}[^{END}]*{END}(?:\^\{{?-?\d\}}?)?|[A-Za-z]+(?:\^\{{?-?\d\}}?)?|/|\*|\\cdot")
_SINGLE = re.compile(r"[A-Za-z](?:\^\{?-?\d\}?)?\Z")
_EXPONENT = re.compile(r"\^(?:-?\d|\{-?\d\})\Z")
MANY_WORDS: Final = 12


def _without_unit(text: str) -> tuple[str, Unit | None]:
    """The text without the unit or the label behind a number, and the unit if it is one of measurement."""
    text = text.rstrip(" .")
    unit = None
    if r"^\circ" in text and not _TRIGONOMETRY.search(text):
        scale = re.search(rf"\^\\circ ?{START}? ?([CFK]) ?{END}?\Z", text)
        if scale:
            return text[: scale.start()], unit_of({"C": "celsius", "F": "fahrenheit", "K": "K"}[scale[1]])
        text, unit = text.replace(r"^\circ", "").rstrip(), DEGREE
    start = _tail(text)
    head, tail = text[:start].rstrip(), text[start:]
    if not tail.strip():
        return text, unit
    pieces = list(_PARTS.finditer(tail))
    if not pieces or len(pieces) > MANY_WORDS:
        return text, unit
    for index, piece in enumerate(pieces):
        before = head if index == 0 else (head + " " + tail[: piece.start()]).rstrip()
        if not _countable(before):
            continue
        rest = tail[piece.start() :]
        wrapped = all(found[0][0] in START + "/*\\" for found in pieces[index:])
        spelled = rest.replace(START, " ").replace(END, "").strip()
        measured = unit_of(spelled)
        if measured and (wrapped or (_counts(before) and not _SINGLE.match(spelled))):
            return before, measured
        if (
            not measured
            and _counts(before)
            and _is_label(spelled, wrapped, spaced=text[: start + piece.start()].endswith(" "))
        ):
            return before, unit
    return text, unit


def _tail(text: str) -> int:
    """Where the words at the end of the text begin (wrapped text, plain words, powers, / and *)."""
    index = len(text)
    while index > 0:
        sign = text[index - 1]
        if sign == END:
            index = max(0, text.rfind(START, 0, index))
        elif sign.isalpha():
            begin = index - 1
            while begin and text[begin - 1].isalpha():
                begin -= 1
            if begin and text[begin - 1] == "\\":
                return index
            index = begin
        elif sign in " /*.":
            index -= 1
        elif power := _EXPONENT.search(text, max(0, index - 5), index):
            index = power.start()
            if index == 0 or not (text[index - 1].isalpha() or text[index - 1] == END):
                return power.end()
        else:
            return index
    return 0


def _countable(text: str) -> bool:
    """Something that a unit can follow ends here."""
    return bool(text) and (text[-1] in ")}]%" or text[-1].isalnum()) and not text.endswith((r"\frac", "^", "_"))


def _counts(text: str) -> bool:
    """A number ends here, not a variable."""
    return not text[-1].isalpha() or text.endswith(r"\pi")


def _is_label(text: str, wrapped: bool, *, spaced: bool) -> bool:
    r"""What is counted: `\text{ apples}`, or plain words of four letters and more; nothing at all in a wrapper, too."""
    words = _WORD.findall(text)
    if not words:
        return wrapped and not text.strip()
    if not _NO_UNIT.isdisjoint(map(str.lower, words)) or not FUNCTIONS.isdisjoint(words) or not words[0][1:].islower():
        return False
    if wrapped:
        return len(words[0]) > 2 and _LABEL.match(text) is not None
    return spaced and len(words[0]) > 3 and text.replace(" ", "").isalpha()


def _is_words(text: str) -> bool:
    """It is text: it begins with a word in a wrapper, or has a plain word of four letters."""
    if r"\begin" in text:
        return False
    marked = text.lstrip(" (\"'")
    if marked.startswith(START):
        return any(len(word) > 1 for word in _WORD.findall(marked[: marked.find(END)]))
    return any(word not in FUNCTIONS for word in _LONG_WORD.findall(marked))


# ------------------------------------------------------------------------------------------------------------ ends


def _without_marks(text: str) -> str:
    if START in text:
        text = _MARKS.sub("", text)
    return " ".join(text.split())


def _without_ends(text: str) -> str:
    text = text.rstrip(" .,;")
    while text.startswith(("=", r"\approx ", r"\therefore ", ":")):
        text = text.removeprefix("=").removeprefix(r"\approx ").removeprefix(r"\therefore ").removeprefix(":").lstrip()
    return text
