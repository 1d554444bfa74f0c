r"""Mathematical answers as values: what is read, what is equal and what isn't, kind by kind, and the limits."""

import re
from fractions import Fraction

import pytest

from areal_async.rewards.math.arithmetic import negative, number
from areal_async.rewards.math.compare import Policy, equal
from areal_async.rewards.math.parse import parse
from areal_async.rewards.math.values import (
    Based,
    Constant,
    Interval,
    Listing,
    Matrix,
    Number,
    Percent,
    Relation,
    Set,
    Symbol,
    Text,
    Time,
    Tuple,
    Value,
)

from .timing import seconds_of

USUAL = Policy(bare_percent=True, rounding_digits=6)
STRICT = Policy(bare_percent=False, rounding_digits=None)
X, Y = Symbol("x"), Symbol("y")


def half() -> Number:
    return Number(Fraction(1, 2))


def numbers(*values: int) -> tuple[Number, ...]:
    return tuple(map(number, values))


READ: dict[str, Value] = {
    "5": number(5),
    "-2.50": Number(Fraction(-5, 2), 2),
    "+7": number(7),
    r"\frac{1}{2}": half(),
    r"\dfrac12": half(),
    r"\frac1{2}": half(),
    r"\frac 1 2": half(),
    "1/2": half(),
    r"1\frac{1}{2}": Number(Fraction(3, 2)),
    "1 1/2": Number(Fraction(3, 2)),
    r"-2\frac34": Number(Fraction(-11, 4)),
    r"2\frac{5}{3}": Number(Fraction(10, 3)),  # an improper fraction is a factor
    r"1.2\times 10^{-3}": Number(Fraction(12, 10_000), 4),
    "1e5": number(100_000),
    "2.5e-3": Number(Fraction(25, 10_000), 4),
    r"0.\overline{3}": Number(Fraction(1, 3)),
    r"0.1\overline{6}": Number(Fraction(1, 6)),
    r"\sqrt{16}": number(4),
    r"\sqrt[3]{-8}": number(-2),
    r"\sqrt{\frac{4}{9}}": Number(Fraction(2, 3)),
    "2^{10}": number(1024),
    "2^10": number(1024),
    "2^{-1}": half(),
    "8^{2/3}": number(4),
    "5!": number(120),
    r"\binom{5}{2}": number(10),
    "|-3|": number(3),
    "-2^2": number(-4),
    "2^3^2": number(512),
    "1/2/2": Number(Fraction(1, 4)),
    r"28\%": Percent(number(28)),
    "-5%": Percent(number(-5)),
    "x": X,
    r"\alpha": Symbol("alpha"),
    "x_{12}": Symbol("x_12"),
    r"\mathrm{e}": Constant("e"),
    "pi": Constant("pi"),
    "(E)": Symbol("E"),
    r"\text{E}": Symbol("E"),
    "(1,2)": Tuple(numbers(1, 2)),
    "[1,2]": Interval(*numbers(1, 2), True, True),
    "(1,2]": Interval(*numbers(1, 2), False, True),
    r"[0,\infty)": Interval(number(0), Constant("inf"), True, False),
    "[1,2,3]": Tuple(numbers(1, 2, 3)),
    r"\langle 1,2 \rangle": Tuple(numbers(1, 2)),
    r"\{1,2\}": Set(numbers(1, 2)),
    r"\emptyset": Set(()),
    r"\{\}": Set(()),
    "1,2": Listing(numbers(1, 2)),
    r"\pm 2": Listing(numbers(2, -2), "sign"),
    r"x=1 \text{ or } x=2": Listing((Relation((X, number(1)), ("=",)), Relation((X, number(2)), ("=",)))),
    r"1 < x \le 5": Relation((number(1), X, number(5)), ("<", "<=")),
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": Matrix((numbers(1, 2), numbers(3, 4))),
    r"2\begin{bmatrix} 1 \\ x \end{bmatrix}": Matrix(((number(2),), (parse("2x") or X,))),
    "12:00": Time((12, 0)),
    "7:30 p.m.": Time((7, 30), "pm"),
    "52_8": Based("52", 8),
    "1A_{16}": Based("1A", 16),
    r"\text{east}": Text("east", parse("e a s t")),
    "-x": negative(X),
}


@pytest.mark.parametrize("text", READ)
def test_what_is_read(text: str) -> None:
    assert parse(text) == READ[text]


NOT_READ = [
    "", " ", ",", "1/0", "0^{-1}", "(1,2", "1,2)", "(1,2}", r"\frac{1}", "2 3", "5!!", "x^{2}^{3}", r"\sum_{k} k",
    r"\int x", "{", "}", r"\left(", "|", "=", "1+", "*2", r"\sqrt", r"\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}",
    "(-1)!", r"\pm", "[1,2", r"\sqrt[0]{2}", "0.5!",
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_READ)
def test_what_is_not_read(text: str) -> None:
    assert parse(text) is None


def test_a_long_text_is_not_read() -> None:
    assert parse("x" + " " * 100) == X
    assert parse("x" + " " * 5_000) is None


EQUAL = r"""
numbers:
    0.5  same  \frac{1}{2}
    5.0  same  5
    1e3  same  1000
    \frac{-1}{2}  same  -\frac12
    2.50  same  2.5
    \frac{6}{4}  same  1.5
    6.02\times10^{23}  same  6.02e23
    10^6  same  1{,}000{,}000
    11/4  same  2\frac34
    \frac13  same  0.\overline{3}
    \frac{0.5}{2}  same  0.25
    \frac{1}{2004!}  same  \frac{1}{2004!}
rounded:
    1/3  same  0.333333
    2/3  same  0.6666667
    \pi  same  3.14159265
    \sqrt2  same  1.414214
    0.3333333333  same  0.333333
    33.333333%  same  1/3
    1e6/3  same  3.33333333333333e5
percent:
    28\%  same  0.28
    28\%  same  28
    50\%  same  \frac12
    28%  same  28 percent
    12.5%  same  1/8
units:
    5  same  5\text{ cm}
    5 m  same  500 cm
    5\text{ cm}^2  same  5 square centimeters
    90^\circ  same  90
    90^\circ  same  \frac{\pi}{2}
times and ratios:
    3:4  same  6:8
    3:4  same  \frac34
    2:3:4  same  4:6:8
    12:00 PM  same  12:00
    1:10  same  0.1
tuples:
    (2,4)  same  ( 2, 4)
    (0.5,3)  same  \left(\frac{1}{2},3\right)
    (1,2)  same  1,2
    (1,2)  same  (x,y)=(1,2)
    [1,2,3]  same  (1,2,3)
    (1,2)  same  \langle 1,2 \rangle
lists:
    1,2  same  2,1
    1,2  same  \{2,1\}
    x=1,y=2  same  y=2,x=1
    \pm 2  same  -2, 2
    1\pm\sqrt2  same  1+\sqrt2, 1-\sqrt2
    x=1 or x=2  same  1, 2
    x=\pm 2  same  x=2, x=-2
    A,B  same  A, B
    \pm 0  same  0
sets:
    \{1,1,2\}  same  \{2,1\}
    \{5\}  same  5
    \{1\pm\sqrt{5},-2\}  same  1+\sqrt5, 1-\sqrt5, -2
    (1, \pm 2)  same  (1,2), (1,-2)
    a \pm b \mp c  same  a+b-c, a-b+c
    \emptyset  same  \{\}
    \{\sqrt4, 3\}  same  \{3,2\}
intervals:
    [-1,-\frac12)\cup(-\frac12,0)  same  [-1,-0.5)\cup(-0.5,0)
    (0,1]\cup(1,2)  same  (0,2)
    x>1  same  (1,\infty)
    1<x\le5  same  (1,5]
    x\in[1,2]  same  [1,2]
    \mathbb{R}\setminus\{0\}  same  (-\infty,0)\cup(0,\infty)
    x<1 or x>3  same  (3,\infty)\cup(-\infty,1)
    x\ne0  same  (-\infty,0)\cup(0,\infty)
    (-\infty,\infty)  same  \mathbb{R}
    [-\sqrt2,\sqrt2]  same  -\sqrt{2}\le x\le\sqrt2
    \{x \mid x>1\}  same  (1,\infty)
    \{x : x>1\}  same  x>1
    [0,2]\cap[1,3]  same  [1,2]
    [1,2]  same  [1,2)\cup\{2\}
matrices:
    \begin{pmatrix}1\\2\end{pmatrix}  same  (1,2)
    \begin{pmatrix}1&2\end{pmatrix}  same  (1,2)
    \frac12\begin{pmatrix}2\\4\end{pmatrix}  same  \begin{bmatrix}1\\2\end{bmatrix}
    \begin{vmatrix}1&2\\3&4\end{vmatrix}  same  \det\begin{pmatrix}1&2\\3&4\end{pmatrix}
equations:
    5  same  x=5
    5  same  x=2+3=5
    5  same  AB=5
    \frac12  same  P(A)=0.5
    x^2  same  f(x)=x^2
    2x+2y=4  same  x+y=2
    34x+45y-20z+100=0  same  -34x-45y+20z-100=0
    y=2x+1  same  2x-y+1=0
    x^2+y^2=1  same  1=x^2+y^2
    x\approx 3.1  same  3.1
inequalities:
    x \le 5  same  5 \ge x
    x<2  same  2x<4
    1 \le x < 3  same  3 > x \ge 1
    x<2  same  -x>-2
    x+y<1  same  2>2x+2y
text:
    E  same  \text{E}
    Yes  same  yes
    \text{East}  same  east
    xy  same  yx
    xy  same  y\cdot x
    even  same  \text{even}
bases:
    52_8  same  052_8
    1A_{16}  same  1A_{16}
algebra:
    (x-1)(x+2)  same  x^2+x-2
    \frac{x^2-1}{x-1}  same  x+1
    2^{3x}  same  8^x
    x^{1/3}  same  \sqrt[3]{x}
    |x-1|  same  |1-x|
    \frac{n!}{(n-2)!}  same  n^2-n
    \binom{n}{2}  same  \frac{n(n-1)}{2}
    2\pi r^3/3  same  \frac{2}{3}\pi r^3
    f(x)+1  same  1+f(x)
    \lfloor x+1 \rfloor  same  \lfloor 1+x \rfloor
    5^{1000}x  same  5\cdot5^{999}x
    a_1+a_2  same  a_2+a_{1}
    (x+1)^{20}  same  (1+x)^{20}
roots:
    \frac{1}{\sqrt2}  same  \frac{\sqrt2}{2}
    \sqrt{50}  same  5\sqrt2
    \sqrt{3+2\sqrt2}  same  1+\sqrt2
    \sqrt{ab}  same  \sqrt{a}\sqrt{b}
    (-8)^{1/3}  same  -2
    \sqrt{x-30}  same  \frac{x-30}{\sqrt{x-30}}
functions:
    \sin^2 x+\cos^2 x  same  1
    \sin 2x  same  2\sin x\cos x
    \tan x  same  \frac{\sin x}{\cos x}
    \log_2 8  same  3
    \ln(x^2)  same  2\ln x
    \sin\frac{\pi}{6}  same  1/2
    \sin 30^\circ  same  0.5
    \arcsin x+\arccos x  same  \frac\pi2
    \cosh^2 x-\sinh^2 x  same  1
    \sin^{-1}(1)  same  \frac{\pi}{2}
    \exp(x)  same  e^x
    \log 100  same  2
    \lfloor\pi\rfloor  same  3
    e^{1000}\pi  same  \pi e^{999}e
    1-\frac{1}{\mathrm{e}}  same  \frac{e-1}{e}
    \operatorname{arctan}(1)  same  \frac{\pi}{4}
complex:
    e^{i\pi}  same  -1
    \sqrt{-4}  same  2i
    (1+i)^2  same  2i
    \frac{1}{1+i}  same  \frac{1-i}{2}
    a+bi  same  bi+a
beyond the limits:
    9^{9^{9}}+1  same  1+9^{9^9}
    1000000!  same  (1000000)!
"""

DIFFERENT = r"""
numbers:
    \frac{1}{2}  other  \frac13
    0.5  other  0.50001
    9500  other  950
    1,2  other  12
    50  other  0.5
    100  other  1e3
    \frac{1}{2^{99}}  other  \frac{1}{2^{98}}
    \frac{1}{2004!}  other  \frac{1}{2006!}
    2  other  2.0000001
    \frac{1}{23}  other  \frac{12}{3}
rounded:
    1/3  other  0.33333
    1/3  other  0.333334
    \frac1{2^{99}}  other  0.000000
    \pi  other  3.14159
    \pi  other  3.1415926
    \sqrt2  other  1.414213
    x  other  0.333333
    \frac{1}{3000000}  other  0.0000003
percent:
    28\%  other  2800
    28\%  other  29\%
    28\%  other  0.0028
units:
    5 cm  other  5 m
    5 cm  other  5 kg
    5 meters  other  5 kg
    90^\circ  other  \pi
    5\text{ cm}  other  6
times and ratios:
    12:00  other  1:00
    12:00  other  0:00
    3:4  other  4:3
    12:00 PM  other  12:00 AM
    2:3  other  2:3:4
    0:0  other  3:4
tuples:
    (1,2)  other  (2,1)
    (1,2)  other  [1,2]
    (1,2)  other  (1,2,3)
    (1,2)  other  2,1
    (1,2)  other  \{1,2\}
lists:
    \pm 2021  other  2021
    2  other  2 or 3
    1,1  other  1
    \sqrt2, \sqrt2  other  \frac{2}{\sqrt2}, 5
    C,A,B  other  A,B,C
    x=1,y=2  other  x=2,y=1
    1,2  other  1,2,3
sets:
    \{1,2\}  other  \{1,3\}
    \{1,2\}  other  [1,2]
    \{1,2\}  other  \{1\}
intervals:
    (0,1]  other  [0,1)
    [0,1]  other  (0,1)
    (0,1)\cup(1,2)  other  (0,2)
    x>1  other  (1,2)
    x>1  other  [1,\infty)
    x<1 or x>3  other  x<1 and x>3
    \mathbb{R}  other  \mathbb{Z}
    [0,\sqrt2]  other  [0,1.414]
    (a,b)\cup(c,d)  other  (a,b)\cup(c,e)
matrices:
    \begin{pmatrix}1&2\end{pmatrix}  other  \begin{pmatrix}1\\2\end{pmatrix}
    \begin{pmatrix}1&2\\3&4\end{pmatrix}  other  \begin{pmatrix}1&3\\2&4\end{pmatrix}
    \begin{pmatrix}1&2\\3&4\end{pmatrix}  other  \begin{vmatrix}1&2\\3&4\end{vmatrix}
equations:
    a+3z=0  other  0
    3x-y+13=0  other  3x+4y+14=0
    x^2=4  other  4
    |x|=5  other  5
    x=5  other  y=5
    x=y  other  y=z
    x=3=5  other  5
    x=5  other  6
inequalities:
    x \le 5  other  x<5
    x<2  other  x>2
    x<2  other  -x<-2
    1<x<5  other  1<x<6
    x<2  other  2
text:
    \text{yes}  other  \text{no}
    cat  other  act
    no  other  on
    AB  other  ab
    x  other  X
    a  other  b
    even  other  odd
bases:
    52_8  other  528
    52_8  other  52
    52_8  other  42
    52_8  other  52_9
algebra:
    (x-1)(x+2)  other  x^2+x-3
    1/2x  other  1/(2x)
    xy  other  x+y
    x  other  \sqrt{x^2}
    x+1  other  x-1
    x+\frac{1}{2^{200}}  other  x
    |x|  other  x
    |x+50|  other  x+50
    \sqrt{(x-5000)^2}  other  5000-x
    \max(x,-70)  other  x
    \lfloor x \rfloor  other  \lfloor x+\frac{1}{1000} \rfloor
    f(x)  other  f(y)
    (x+1)^{20}  other  (x+1)^{21}
    x_1  other  x_2
near misses:
    e^{\pi\sqrt{163}}  other  262537412640768744
    x+e^{-1000}  other  x
    x e^{-1000}  other  2xe^{-1000}
    \tanh(1000)  other  1
    \arctan(e^{1000})  other  \frac\pi2
    \sqrt2+10^{-40}  other  \sqrt2
    \frac{\pi}{2^{99}}  other  \frac{\pi}{2^{98}}
    \sqrt{10^{60}+1}  other  10^{30}
    \cos(10^{-30})  other  1
    \sin(10^{-50})  other  10^{-50}
    \frac{\pi}{2004!}  other  \frac{\pi}{2006!}
    22\pi^4  other  2143
    \sqrt{10^{40}+1}+\sqrt{10^{40}+3}  other  2\sqrt{10^{40}+2}
functions:
    \ln 2  other  \log 2
    1-\frac1e  other  1+\frac1e
    \sin x  other  \cos x
    \sin 2x  other  2\sin x
complex:
    i  other  -i
    1+i  other  1-i
    e^{i\pi}  other  1
beyond the limits:
    9^{9^{9}}  other  9^{9^{8}}
    1  other  1000000!
    9^{9^9}  other  9^{9^9}+1
"""


def pairs(table: str) -> dict[str, list[list[str]]]:
    """Of each kind."""
    found: dict[str, list[list[str]]] = {}
    for line in table.strip().splitlines():
        if line.startswith(" "):
            found[list(found)[-1]].append(re.split("  (?:same|other)  ", line.strip()))
        else:
            found[line.rstrip(":")] = []
    return found


def readable(text: str) -> Value:
    value = parse(text)
    assert value is not None, f"{text} was not read"
    return value


def verdicts(table: list[list[str]]) -> dict[str, tuple[bool, bool]]:
    """Both ways round."""
    return {
        f"{one}  and  {other}": (
            equal(readable(one), readable(other), USUAL),
            equal(readable(other), readable(one), USUAL),
        )
        for one, other in table
    }


@pytest.mark.parametrize("kind", pairs(EQUAL))
def test_what_is_equal(kind: str) -> None:
    found = verdicts(pairs(EQUAL)[kind])
    assert found == dict.fromkeys(found, (True, True))


@pytest.mark.parametrize("kind", pairs(DIFFERENT))
def test_what_is_not_equal(kind: str) -> None:
    found = verdicts(pairs(DIFFERENT)[kind])
    assert found == dict.fromkeys(found, (False, False))


def test_what_is_policy() -> None:
    assert equal(readable("28%"), readable("0.28"), STRICT)
    assert not equal(readable("28%"), readable("28"), STRICT)
    assert not equal(readable("1/3"), readable("0.333333333333"), STRICT)
    assert not equal(readable("0.3333333333"), readable("0.333333"), STRICT)
    three = Policy(bare_percent=False, rounding_digits=3)
    assert equal(readable("1/3"), readable("0.333"), three)
    assert not equal(readable("1/3"), readable("0.33"), three)
    assert equal(readable(r"(1/3, \sqrt2]"), readable("(0.333, 1.414]"), three)


LIMITS = {
    "a tower": "9^{9^{9}}",
    "a tower in a fraction (M15)": r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",
    "a factorial": "1000000!",
    "a smaller factorial": "200000!",
    "mixed fractions": r"1\frac{" * 30 + "x" + "}{2}" * 30,
    "a factorial of a factorial": "(3000!)!",
    "large powers": "2^{9999}" * 600,
    "large sums": "+".join(f"1/{index}!" for index in range(2900, 2999)),
    "large binomials": r"\binom{1000}{500}" * 200,
    "larger binomials": r"\binom{3000}{1500}" * 200,
    "many functions": "+".join(rf"\sin(\frac{{{index}}}{{7}}\pi)" for index in range(1, 200)),
    "round brackets": "(" * 2000 + "1" + ")" * 2000,
    "fractions": r"\frac{1}{" * 700 + "1" + "}" * 700,
    "open brackets": r"\left(" * 700,
    "functions": r"\sin " * 900,
    "signs": r"\pm 1" * 600,
    "nested signs": r"\pm(" * 900 + "1" + ")" * 900,
    "bars": "|" * 4000,
    "unions": r"(1,2)\cup" * 400 + "(3,4)",
    "exponents": "x^" * 2000 + "x",
    "a long list": ",".join(map(str, range(1300))),
    "an exponent": "1e999999",
    "digits": "9" * 4999,
    "100,000 digits": "9" * 100_000,
    "100,000 terms": "1+" * 50_000 + "1",
    "100,000 brackets": "(" * 100_000,
    "100,000 spaces": " " * 100_000,
    "100,000 words": "the answer is " * 7_200,
}
LIMIT_S = 0.05  # of this process's own time


@pytest.mark.parametrize("kind", LIMITS)
def test_limits(kind: str) -> None:
    text, other = LIMITS[kind], readable("x+1")

    def work() -> None:
        value = parse(text)
        if value is not None:
            assert equal(value, value, USUAL)
            assert not equal(value, other, USUAL)
            repr(value)

    assert seconds_of(work) < LIMIT_S
