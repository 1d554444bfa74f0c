r"""A recursive descent over cleaned LaTeX and plain mathematics.

What always holds: what can't be read raises Unreadable, and nothing else is raised; depth, items and steps are bounded.

Precedence, loosest first: list (`,` `;` `\lor` `\land`), relation, union of sets, ratio, sum, product (also by writing
side by side, of the same strength as `/`, so 1/2x is x/2), sign, power, postfix. A ± is read once with each sign.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product as combinations
from typing import Final

from areal_async.rewards.math import tokens as lexer
from areal_async.rewards.math.arithmetic import (
    MINUS_ONE,
    TEN,
    TWO,
    applied,
    binomial,
    decimal,
    expression,
    factorial,
    negated,
    negative,
    number,
    power,
    product,
    proper,
    quotient,
    root,
    scaled,
    total,
)
from areal_async.rewards.math.tokens import RELATIONS, SET_OPERATORS, Reader, Token
from areal_async.rewards.math.units import DEGREE
from areal_async.rewards.math.values import (
    Based,
    Call,
    Combined,
    Constant,
    Expression,
    Interval,
    Listing,
    Matrix,
    Number,
    Percent,
    Quantity,
    Ratio,
    Reals,
    Relation,
    Set,
    Symbol,
    Tuple,
    Unreadable,
    Value,
)

MAX_DEPTH: Final = 40
MAX_SIGNS: Final = 3  # of ± in one item, so at most eight readings
MAX_ITEMS: Final = 200
MAX_SET_TOKENS: Final = 500  # in one union

_OPENING: Final = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle"}
_MATRICES: Final = frozenset(lexer.words("matrix pmatrix bmatrix Bmatrix vmatrix smallmatrix array"))
NAMED_FUNCTIONS: Final = frozenset("fghFGHPT")
"""Letters that, right before a bracket, name a function: f(x)."""
_BEGINNINGS: Final = frozenset(
    lexer.words("\\cdot \\times \\div \\frac \\sqrt \\binom \\lfloor \\lceil \\begin \\overline \\bar \\hat \\det")
)
_INVERSES: Final = {
    **{name: "arc" + name for name in lexer.words("sin cos tan cot sec csc")},
    "sinh": "arsinh", "cosh": "arcosh", "tanh": "artanh",
}  # fmt: skip


class Parser(Reader):
    """Of one text. Each method reads what it is named after, and leaves the rest."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self._depth = 0
        self._in_bars = False  # between bars, or in a set before its condition: a bar ends something
        self._signs: Sequence[int] = (1,) * MAX_SIGNS  # of each ± in this item, in this reading
        self._seen = 0

    def _deeper(self, read: Callable[[], Value], *, in_bars: bool = False) -> Value:
        """One level of brackets."""
        bars, self._in_bars = self._in_bars, in_bars
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        value = read()
        self._depth -= 1
        self._in_bars = bars
        return value

    # ----------------------------------------------------------------------------------------- lists and relations

    def whole(self) -> Value:
        value = self._spread_list()
        if self._next.kind != "end":
            raise Unreadable(f"{self._next.text} at a place where it means nothing")
        return value

    def _spread_list(self) -> Value:
        """A list in which what has a ± stands for both."""
        return self._list(self._spread)

    def _plain_list(self) -> Value:
        """A list in which a ± belongs to something larger: (1, ±2) is two pairs."""
        return self._list(lambda: [self._relation()])

    def _list(self, item: Callable[[], list[Value]]) -> Value:
        items = item()
        joined = "sign"
        while self._at(",", ";", "\\lor", "\\land"):
            joined = {"\\lor": "or", "\\land": "and"}.get(self._take().text, ",")
            items += item()
            if len(items) > MAX_ITEMS:
                raise Unreadable("too many items")
        return items[0] if len(items) == 1 else Listing(tuple(items), joined)

    def _spread(self) -> list[Value]:
        """One item, or several where it has a ±: all combinations, but both or neither where there is a ∓."""
        outer = self._signs, self._seen
        start = self._index
        self._signs, self._seen = (1,) * MAX_SIGNS, 0
        found = [self._relation()]
        end, seen = self._index, self._seen
        tied = any(token.text == "\\mp" for token in self._tokens[start:end])
        for signs in list(combinations((1, -1), repeat=min(seen, 1) if tied else seen))[1:]:
            self._index, self._seen = start, 0
            self._signs = signs * MAX_SIGNS if tied else signs
            other = self._relation()
            if other not in found:
                found.append(other)
        self._signs, self._seen = outer
        return found

    def _sign(self, token: Token) -> int:
        """+1 or -1 for + - ± ∓."""
        if token.text in "+-":
            return 1 if token.text == "+" else -1
        if self._seen >= MAX_SIGNS:
            raise Unreadable("too many ±")
        self._seen += 1
        return self._signs[self._seen - 1] * (1 if token.text == "\\pm" else -1)

    def _relation(self) -> Value:
        sides, operators = [self._set()], []
        while self._next.text in RELATIONS and self._next.kind in ("sign", "command"):
            operators.append(RELATIONS[self._take().text])
            sides.append(self._set())
        return Relation(tuple(sides), tuple(operators)) if operators else sides[0]

    def _set(self) -> Value:
        value = self._ratio()
        start = self._index
        while self._at(*SET_OPERATORS):
            if self._index - start > MAX_SET_TOKENS:
                raise Unreadable("too many sets")
            operator = SET_OPERATORS[self._take().text]
            other = self._ratio()
            if isinstance(value, Combined) and value.operator == operator != "setminus":
                value = Combined(operator, (*value.parts, other))
            else:
                value = Combined(operator, (value, other))
        return value

    def _ratio(self) -> Value:
        value = self._sum()
        if self._in_bars or not self._at(":"):
            return value
        parts = [expression(value)]
        while self._accept(":"):
            parts.append(expression(self._sum()))
        return Ratio(tuple(parts))

    # -------------------------------------------------------------------------------------------------- arithmetic

    def _sum(self) -> Value:
        value = self._signed()
        if not self._at("+", "-", "\\pm", "\\mp"):
            return value
        terms = [expression(value)]
        while self._at("+", "-", "\\pm", "\\mp"):
            sign = self._sign(self._take())
            while self._at("+", "-"):  # x + -1
                sign *= self._sign(self._take())
            term = expression(self._product())
            terms.append(term if sign > 0 else negative(term))
        return total(terms)

    def _signed(self) -> Value:
        sign = 1
        while self._at("+", "-", "\\pm", "\\mp"):
            sign *= self._sign(self._take())
        value = self._product()
        return value if sign > 0 else negated(value)

    def _product(self) -> Value:
        first = self._factor()
        if not self._continues():
            return first
        factors: list[Expression] = []
        matrix = first if isinstance(first, Matrix) else None
        if matrix is None:
            factors.append(expression(first))
        while self._continues():
            divides = self._at("/", "\\div")
            explicit = self._accept("/", "\\div", "*", "\\cdot", "\\times")
            if not explicit and self._next.kind == "number" and self._tokens[self._index - 1].kind == "number":
                raise Unreadable("two numbers side by side")
            value = self._operand() if explicit else self._factor()
            if isinstance(value, Matrix) and matrix is None and not divides:
                matrix = value
                continue
            factor = expression(value)
            factors.append(power(factor, MINUS_ONE) if divides else factor)
        result = product(factors)
        return result if matrix is None else scaled(result, matrix)

    def _operand(self) -> Value:
        """What follows an operator: a factor, perhaps with a sign of its own."""
        sign = 1
        while self._at("+", "-"):
            sign *= self._sign(self._take())
        value = self._factor()
        return value if sign > 0 else negative(expression(value))

    def _continues(self) -> bool:
        """Another factor follows."""
        token = self._next
        if token.kind == "sign":
            return token.text in ("*", "/", "(", "{", "[") or (token.text == "|" and not self._in_bars)
        if token.kind == "command":
            return token.text in _BEGINNINGS
        return token.kind in ("number", "function", "name", "constant")

    def _factor(self) -> Value:
        """A primary with what follows it: ! % ° and powers."""
        value = self._primary()
        signs = ""
        while self._at("!", "\\%", "^"):
            sign = self._take().text
            if sign in signs:
                raise Unreadable("5!! is no factorial of a factorial, x^a^b with braces is nothing")
            signs += sign
            if sign == "!":
                value = factorial(expression(value))
            elif sign == "\\%":
                value = Percent(expression(value))
            elif self._circle():
                value = Quantity(expression(value), DEGREE)
            else:
                value = power(expression(value), self._exponent())
        return value

    def _circle(self) -> bool:
        if self._accept("\\circ"):
            return True
        if [token.text for token in self._tokens[self._index : self._index + 3]] == ["{", "\\circ", "}"]:
            self._index += 3
            return True
        return False

    def _exponent(self) -> Expression:
        if self._at("{"):
            return self._group()
        sign = 1
        while self._at("-", "+"):
            sign *= self._sign(self._take())
        value = expression(self._primary())
        if self._accept("^"):
            value = power(value, expression(self._deeper(self._exponent)))
        return value if sign > 0 else negative(value)

    def _group(self) -> Expression:
        """{…} or, as an argument, one sign."""
        if self._accept("{"):
            value = self._deeper(self._relation)
            self._expect("}")
            return expression(value)
        return expression(self._deeper(self._primary))

    # --------------------------------------------------------------------------------------------------- primaries

    def _primary(self) -> Value:
        token = self._take()
        match token.kind:
            case "number":
                return self._number(token)
            case "based":
                digits, _, base = token.text.partition("_")
                return Based(digits, int(base.strip("{}")))
            case "constant" if not self._at("_"):
                return Constant(token.text)
            case "constant" | "name":
                return self._named(token.text)
            case "function":
                return self._function(token.text)
            case "command":
                return self._command(token.text)
            case "sign":
                return self._enclosed(token.text)
        raise Unreadable("the end comes too early")

    def _number(self, token: Token) -> Expression:
        text, _, exponent = token.text.lower().partition("e")
        whole, _, fraction = text.partition(".")
        if exponent:
            return product((decimal(whole or "0", fraction), power(TEN, number(int(exponent)))))
        if self._at("\\overline", "\\dot") and "." in text:
            return self._repeating(whole, fraction)
        value = decimal(whole or "0", fraction)
        return value if fraction else self._mixed(value)

    def _repeating(self, whole: str, fraction: str) -> Number:
        r"""0.1\overline{6}"""
        digits = ""
        while self._accept("\\overline", "\\dot"):
            braced = self._accept("{")
            token = self._take()
            if token.kind != "number" or not token.text.isdigit():
                raise Unreadable("no digits repeat")
            digits += token.text
            if braced:
                self._expect("}")
        period = Fraction(int(digits), 10 ** len(fraction) * (10 ** len(digits) - 1))
        return Number(decimal(whole or "0", fraction).value + period)

    def _mixed(self, whole: Number) -> Expression:
        r"""1\frac{1}{2} or 1 1/2: the fraction is added where it is proper."""
        start, part = self._index, None
        if self._accept("\\frac"):
            part = proper(self._argument(), self._argument())
        elif self._next.kind == "number" and self._next.spaced:
            above, slash, below = self._take(), self._take(), self._take()
            if slash.text == "/" and below.kind == "number" and above.text.isdigit() and below.text.isdigit():
                part = proper(number(int(above.text)), number(int(below.text)))
        if part is not None:
            return Number(whole.value + part)
        self._index = start
        return whole

    def _argument(self) -> Expression:
        r"""An argument of \frac: a group, or one sign, which of a number is one digit (\frac12)."""
        token = self._next
        if token.kind != "number" or not token.text.isdigit():
            return self._group()
        if len(token.text) > 1:
            digits = Token("number", token.text[0], token.spaced), Token("number", token.text[1:], False)
            self._tokens[self._index : self._index + 1] = digits
        self._take()
        return number(int(token.text[0]))

    def _named(self, name: str) -> Expression:
        if self._accept("_"):
            name = f"{name}_{self._subscript()}"
        while self._accept("'"):
            name += "'"
        if (name in NAMED_FUNCTIONS or name.endswith("'")) and self._at("(") and not self._next.spaced:
            return Call(name, tuple(map(expression, self._bracketed())))
        return Symbol(name)

    def _subscript(self) -> str:
        return self._raw() if self._accept("{") else self._take().text

    def _bracketed(self) -> tuple[Value, ...]:
        self._expect("(")
        items = _items(self._deeper(self._plain_list))
        self._expect(")")
        return items

    # --------------------------------------------------------------------------------------------------- functions

    def _function(self, name: str) -> Expression:
        base: Expression | None = None
        exponent: Expression | None = None
        while self._at("_", "^"):
            if self._take().text == "_":
                base = self._group()
            else:
                exponent = self._exponent()
        if exponent == MINUS_ONE and name in _INVERSES:
            name, exponent = _INVERSES[name], None
        if name in ("max", "min", "gcd", "lcm"):
            return Call(name, tuple(map(expression, self._bracketed())))
        value = applied(name, base, expression(self._deeper(self._function_argument)))
        return value if exponent is None else power(value, exponent)

    def _function_argument(self) -> Expression:
        r"""(…), {…}, or factors side by side up to the next function, bracket or sign: \sin 2x."""
        if self._at("(", "["):
            closing = _OPENING[self._take().text]
            value = expression(self._deeper(self._relation))
            self._expect(closing)
            return value
        if self._at("{", "|"):
            return expression(self._factor())
        factors: list[Expression] = [MINUS_ONE] if self._accept("-") else []
        factors.append(expression(self._factor()))
        while self._next.kind in ("number", "name", "constant") or self._at("\\frac", "\\sqrt", "/"):
            divides = self._accept("/")
            factor = expression(self._factor())
            factors.append(power(factor, MINUS_ONE) if divides else factor)
        return product(factors)

    # ------------------------------------------------------------------------------------------ commands and signs

    def _command(self, name: str) -> Value:
        match name:
            case "\\frac":
                return quotient(self._argument(), self._argument())
            case "\\binom":
                return binomial(self._argument(), self._argument())
            case "\\sqrt":
                return self._root()
            case "\\lfloor" | "\\lceil":
                value = expression(self._deeper(self._relation))
                self._expect("\\rfloor" if name == "\\lfloor" else "\\rceil")
                return Call("floor" if name == "\\lfloor" else "ceil", (value,))
            case "\\langle":
                return self._brackets(name)
            case "\\emptyset":
                return Set(())
            case "\\mathbb":
                self._expect("{")
                return Reals(self._raw())
            case "\\overline" | "\\bar" | "\\hat" | "\\overrightarrow" | "\\tilde" | "\\widehat":
                return Call(name, (self._group(),))
            case "\\begin":
                return self._matrix()
            case "\\det":
                inside = self._deeper(self._primary)
                if isinstance(inside, Matrix):
                    return Matrix(inside.rows, bars=True)
        raise Unreadable(f"{name} at a place where it means nothing")

    def _root(self) -> Expression:
        degree: Expression = TWO
        if self._accept("["):
            degree = expression(self._deeper(self._relation))
            self._expect("]")
        return root(self._group(), degree)

    def _enclosed(self, sign: str) -> Value:
        match sign:
            case "{":
                value = self._deeper(self._relation)
                self._expect("}")
                return value
            case "|":
                inside = self._deeper(self._sum, in_bars=True)
                self._expect("|")
                if isinstance(inside, Matrix):
                    return Matrix(inside.rows, bars=True)
                return applied("abs", None, expression(inside))
            case "(" | "[" | "\\{":
                return self._brackets(sign)
        raise Unreadable(f"{sign} at a place where it means nothing")

    def _brackets(self, opening: str) -> Value:
        if opening == "\\{":
            return self._braces()
        inside = self._deeper(self._plain_list)
        items = _items(inside)
        closing = self._expect(")", "]", "\\rangle").text
        if len(items) == 2 and opening in "([" and closing in ")]" and opening + closing != "()":
            return Interval(items[0], items[1], opening == "[", closing == "]")
        if _OPENING[opening] != closing:
            raise Unreadable("brackets that don't belong together")
        return items[0] if len(items) == 1 and opening != "\\langle" else Tuple(items)

    def _braces(self) -> Value:
        """{1, 2}, or {x | x > 1}, which is its condition."""
        if self._accept("\\}"):
            return Set(())
        inside = self._deeper(self._spread_list, in_bars=True)
        if self._accept("|", ":"):
            condition = self._deeper(self._plain_list)
            self._expect("\\}")
            return condition
        self._expect("\\}")
        return Set(inside.items if isinstance(inside, Listing) else (inside,))

    def _matrix(self) -> Value:
        kind = self._environment()
        if kind not in _MATRICES:
            raise Unreadable(f"{kind} is no matrix")
        if kind == "array" and self._accept("{"):
            self._raw()
        rows: list[list[Value]] = [[]]
        while not self._at("\\end"):
            rows[-1].append(self._deeper(self._relation))
            if self._accept("\\\\"):
                rows.append([])
            elif not self._accept("&") and not self._at("\\end"):
                raise Unreadable("a matrix that doesn't end")
        self._take()
        if self._environment() != kind:
            raise Unreadable("a matrix that ends as something else")
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unreadable("rows of different lengths")
        return Matrix(tuple(map(tuple, rows)), bars=kind == "vmatrix")

    def _environment(self) -> str:
        self._expect("{")
        return self._raw()


def _items(value: Value) -> tuple[Value, ...]:
    return value.items if isinstance(value, Listing) and value.joined == "," else (value,)
